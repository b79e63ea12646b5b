"""fx passes that fuse a traced decoder layer into fewer, larger operations.

torch traces the unchanged modeling code of a layer into an fx graph. The passes match patterns by arithmetic, not by
module names: RMS norm, rotary embedding before attention, linear layers of the same input, SiLU-gated products
(SwiGLU), a linear layer added to the residual stream. A graph of only fused operations, views and plain linear layers
runs as it is. Any other graph is left to torch's compiler.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._inductor.compile_fx import compile_fx
from torch.nn import functional

from tunesmith.errors import ModelError
from tunesmith.model.forward.recurrent_ops import step_conv
from tunesmith.model.kernels.prologue import Prologue
from tunesmith.model.merged_weights import concat_linear_op, find_merged_groups
from tunesmith.model.torch_modes import is_exact

MUL = {operator.mul, torch.mul, "mul"}
ADD = {operator.add, torch.add, "add"}
NEG = {operator.neg, torch.neg, "neg"}
LINEAR = {functional.linear, torch._C._nn.linear}
SUMS = {torch.mean, "mean", torch.sum, "sum", torch.var, "var", functional.layer_norm, functional.softmax, "softmax"}
VIEWS = {
    operator.getitem, getattr, "view", "reshape", "transpose", "contiguous", "unsqueeze", "squeeze", "chunk", "to",
    "size",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedOps:
    """Operations whose output is quantized, for a layer that multiplies quantized matrices."""

    rms_norm: Callable[[Tensor, Tensor, float], Any]
    swiglu: Callable[[Any, Tensor, Tensor], Any]
    """(input, gate weight, value weight) -> SiLU(input @ gate.T) * (input @ value.T)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOps:
    """The implementations that a fused layer calls."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(input, weight, epsilon) -> RMS norm over the last axis in the weight's dtype; the input may be wider."""
    merged_linear: Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor]]
    """(input, weights, biases) -> one linear output per weight."""
    silu_and_mul: Callable[[Tensor, Tensor], Tensor]
    """(gate, value) -> SiLU(gate) * value."""
    add_linear: Callable[..., Tensor]
    """(total, input, weight, factor=1) -> total + factor * input @ weight.T; overwrites the total, or not, which may be
    wider."""
    attention: Mapping[Any, Callable[..., Tensor]]
    """For each attention operator of a plan a function of the same arguments and, optionally, a `Prologue`."""
    add_adapters: Callable[..., Sequence[Tensor]] | None = None
    """(totals, input, first factors, second factors, scalings) -> each total + scaling * (input @ first.T) @ second.T;
    overwrites the totals. Not with exact numerics, where the trainer would have to add like the sampler."""
    quantized: QuantizedOps | None = None
    """Set if products quantize their inputs: the output of a norm or of SiLU(gate) * value that only products read is
    quantized at once."""


def fuse_layer(module: fx.GraphModule, fused_ops: FusedOps) -> bool:
    """Fuse a traced layer in place; False if operations remain that only a compiler makes fast."""
    graph = module.graph
    _drop_idle_nodes(graph)
    _fuse_rms_norms(graph, fused_ops)
    _fuse_rope_into_attention(graph, fused_ops)
    _fuse_swiglu(graph, fused_ops)
    _fuse_added_products(graph, fused_ops)
    _merge_linears(graph, fused_ops)
    if fused_ops.add_adapters is not None and not is_exact():
        _fuse_adapters(graph, fused_ops, fused_ops.add_adapters)
    if fused_ops.quantized is not None:
        _quantize_inputs(graph, fused_ops, fused_ops.quantized)
    graph.eliminate_dead_code()
    known = {*VIEWS, *LINEAR, *MUL, *ADD, *fused_ops.attention.values(), Prologue, step_conv}
    known |= {fused_ops.rms_norm, fused_ops.merged_linear, fused_ops.silu_and_mul, fused_ops.add_linear}
    known.add(fused_ops.add_adapters)
    if fused_ops.quantized is not None:
        known -= LINEAR
        known |= {fused_ops.quantized.rms_norm, fused_ops.quantized.swiglu}
    graph.lint()
    module.recompile()
    return all(node.target in known for node in graph.nodes if node.op in ("call_function", "call_method"))


def compile_layer(module: fx.GraphModule, inputs: Sequence[Any], *, ops: FusedOps) -> Callable[..., Any]:
    """Backend of `torch.compile`: fuse a copy of the traced layer, or compile the layer if fusion is incomplete. With
    exact numerics operations that are not fused run as they are, since a compiler rounds where it likes."""
    fused = fx.GraphModule(module, fx.Graph())
    fused.graph.output(fused.graph.graph_copy(module.graph, {}))
    is_whole = fuse_layer(fused, ops)
    if is_exact() and any(_is_call(node, SUMS) for node in fused.graph.nodes):
        raise ModelError("model.numerics=exact: a layer has sums that are not fused; leave it at fast")
    if is_whole or is_exact():
        return fused.forward
    if ops.quantized is not None:
        raise ModelError("the layer has operations other than those of Llama, Qwen 2, Qwen 3 and Mistral")
    _concat_linears(module, inputs)
    return cast(Callable[..., Any], compile_fx(module, list(inputs)))


def _is_call(node: Any, targets: Iterable[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in targets


def _get_example(node: Any) -> Tensor | None:
    """The fake tensor that the node had when the layer was traced, if it was a tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _unwrap(node: Any, targets: Iterable[Any]) -> Any:
    """The first argument of a call of one of the targets; any other node unchanged."""
    return node.args[0] if _is_call(node, targets) else node


def _match_binary(node: Any, targets: Iterable[Any]) -> tuple[Any, Any] | None:
    """The two arguments of a binary call of one of the targets."""
    return (node.args[0], node.args[1]) if _is_call(node, targets) and len(node.args) == 2 and not node.kwargs else None


def _drop_idle_nodes(graph: fx.Graph) -> None:
    """Erase casts to the dtype that a tensor has, and dropout of a model that is not trained."""
    for node in list(graph.nodes):
        value = _get_example(node)
        is_cast = _is_call(node, {"to"}) and value is not None and node.args[1:] == (value.dtype,) and not node.kwargs
        is_kept = _is_call(node, {functional.dropout}) and node.args[2:3] == (False,)
        source = _get_example(node.args[0]) if is_cast or is_kept else None
        if source is not None and value is not None and source.dtype == value.dtype:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _fuse_rms_norms(graph: fx.Graph, fused_ops: FusedOps) -> None:
    for node in list(graph.nodes):
        found = _match_norm(node)
        if found is not None and _is_cast_to_dtype_of(node, found[1]):
            with graph.inserting_before(node):
                _replace_node(node, graph.call_function(fused_ops.rms_norm, found))


def _match_norm(node: Any) -> tuple[Any, Any, float] | None:
    """Input, weight and epsilon of `weight * (x / sqrt(mean(x^2) + epsilon))`, with x in float32."""
    pair = _match_binary(node, MUL)
    if pair is None:
        return None
    for weight, normed in (pair, pair[::-1]):
        tensor = _get_example(weight)
        product = _match_binary(_unwrap(normed, {"to"}), MUL)
        if tensor is None or tensor.dim() != 1 or product is None:
            continue
        for wide, inverse in (product, product[::-1]):
            total = _match_binary(_unwrap(inverse, {torch.rsqrt, "rsqrt"}), ADD)
            if total is None or not isinstance(total[1], float) or not _is_mean_square(total[0], wide):
                continue
            return _unwrap(wide, {"to"}), weight, total[1]
    return None


def _is_cast_to_dtype_of(node: fx.Node, other: Any) -> bool:
    """Whether the node has the other one's dtype, or every user first casts it to that dtype."""
    value, wanted = _get_example(node), _get_example(other)
    if value is None or wanted is None:
        return False
    is_narrowed = [_is_call(user, {"to"}) and user.args[1:] == (wanted.dtype,) for user in node.users]
    return value.dtype == wanted.dtype or all(is_narrowed)


def _is_mean_square(node: Any, wide: Any) -> bool:
    if not _is_call(node, {torch.mean, "mean"}) or node.args[1:] != (-1,) or node.kwargs != {"keepdim": True}:
        return False
    return _match_binary(node.args[0], {torch.pow, "pow", operator.pow}) == (wide, 2)


def _fuse_rope_into_attention(graph: fx.Graph, fused_ops: FusedOps) -> None:
    for node in list(graph.nodes):
        if not _is_call(node, fused_ops.attention):
            continue
        node.target = function = fused_ops.attention[node.target]
        query, key, *rest = node.args
        rotary_query, rotary_key = _match_rotary(query), _match_rotary(key)
        if rotary_query is None or rotary_key is None or rotary_query[1:] != rotary_key[1:]:
            continue
        query, cos, sin = rotary_query
        key = rotary_key[0]
        norms: tuple[Any, Any, float] = (None, None, 0.0)
        normed_query, normed_key = _match_normed_heads(query, fused_ops), _match_normed_heads(key, fused_ops)
        with graph.inserting_before(node):
            if normed_query and normed_key and normed_query[2] == normed_key[2]:
                norms = (normed_query[1], normed_key[1], normed_query[2])
                query, key = (graph.call_method("transpose", (heads[0], 1, 2)) for heads in (normed_query, normed_key))
            prologue = graph.call_function(Prologue, (cos, sin, *norms))
            _replace_node(node, graph.call_function(function, (query, key, *rest, prologue)))


def _match_rotary(node: Any) -> tuple[Any, Any, Any] | None:
    """Heads [1, H, T, D], cosine and sine [1, T, D] of `heads * cos + rotate_half(heads) * sin`."""
    terms = _match_binary(node, ADD)
    first, second = (None, None) if terms is None else (_match_binary(term, MUL) for term in terms)
    if first is None or second is None:
        return None
    (heads, cos), (rotated, sin) = first, second
    if not _is_rotate_half(rotated, heads) or not _is_call(cos, {"unsqueeze"}) or not _is_call(sin, {"unsqueeze"}):
        return None
    tensor = _get_example(heads)
    if tensor is None or cos.args[1:] != (1,) or sin.args[1:] != (1,):
        return None
    angles = [_get_example(table.args[0]) for table in (cos, sin)]
    if any(angle is None or angle.shape[0] != 1 or angle.shape[-1] != tensor.shape[-1] for angle in angles):
        return None
    return heads, cos.args[0], sin.args[0]


def _is_rotate_half(node: Any, heads: Any) -> bool:
    """Whether the node is `rotate_half(heads)`: the second half of each head, negated, before the first half."""
    if not _is_call(node, {torch.cat}):
        return False
    parts, axis = node.args[0], node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    tensor = _get_example(heads)
    if tensor is None or axis != -1 or len(parts) != 2 or not _is_call(parts[0], NEG):
        return False
    half = tensor.shape[-1] // 2
    second, first = _match_binary(parts[0].args[0], {operator.getitem}), _match_binary(parts[1], {operator.getitem})
    return second == (heads, (Ellipsis, slice(half, None, None))) and first == (
        heads,
        (Ellipsis, slice(None, half, None)),
    )


def _match_normed_heads(node: Any, fused_ops: FusedOps) -> tuple[Any, Any, float] | None:
    """Heads [1, T, H, D], weight and epsilon of an RMS norm over heads that is followed by a transpose."""
    if not _is_call(node, {"transpose"}) or node.args[1:] != (1, 2) or not _is_call(node.args[0], {fused_ops.rms_norm}):
        return None
    heads, weight, epsilon = node.args[0].args
    return heads, weight, epsilon


def _fuse_swiglu(graph: fx.Graph, fused_ops: FusedOps) -> None:
    for node in list(graph.nodes):
        pair = _match_binary(node, MUL)
        if pair is None or not _is_call(pair[0], {functional.silu}):
            continue
        gate, value = pair[0].args[0], pair[1]
        is_plain = all(_is_linear_without_bias(part) and len(part.users) == 1 for part in (gate, value))
        is_read_by_products = all(_is_call(user, LINEAR) and user.args[0] is node for user in node.users)
        gate_tensor, value_tensor = _get_example(gate), _get_example(value)
        with graph.inserting_before(node):
            if fused_ops.quantized and is_plain and gate.args[0] is value.args[0] and is_read_by_products:
                arguments = (gate.args[0], gate.args[1], value.args[1])
                _replace_node(node, graph.call_function(fused_ops.quantized.swiglu, arguments))
            elif gate_tensor is not None and value_tensor is not None and _are_alike(gate_tensor, value_tensor):
                _replace_node(node, graph.call_function(fused_ops.silu_and_mul, (gate, value)))
    graph.eliminate_dead_code()


def _are_alike(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape == other.shape and tensor.dtype == other.dtype


def _is_linear_without_bias(node: Any) -> bool:
    return _is_call(node, LINEAR) and (len(node.args) < 3 or node.args[2] is None) and not node.kwargs


def _merge_linears(graph: fx.Graph, fused_ops: FusedOps) -> None:
    """One call for the linear layers that share an input. Which of them are one product is found when it runs, by the
    operation of the device, of quantized weights or with gradients."""
    linears_of: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if _is_call(node, LINEAR) and not node.kwargs:
            linears_of[node.args[0]].append(node)
    for linears in linears_of.values():
        weights: tuple[Any, ...] = tuple(node.args[1] for node in linears)
        biases = tuple(node.args[2] if len(node.args) > 2 else None for node in linears)
        if not all(weight.op in ("placeholder", "get_attr") for weight in weights):
            continue
        with graph.inserting_before(linears[0]):
            outputs = graph.call_function(fused_ops.merged_linear, (linears[0].args[0], weights, biases))
            _replace_by_items(linears, outputs)


def _fuse_adapters(graph: fx.Graph, fused_ops: FusedOps, add_adapters: Callable[..., Any]) -> None:
    """One call for the adapters of the layers that share an input: a product with a first factor, which only a product
    with a second one reads, which is added to a layer's output."""
    for merged in list(graph.nodes):
        if not _is_call(merged, {fused_ops.merged_linear}):
            continue
        inputs, *layers = merged.args
        order = {node: index for index, node in enumerate(graph.nodes)}
        sums: dict[int, fx.Node] = {}
        for item in merged.users:
            users, index = list(item.users), item.args[1]
            is_added = len(users) == 1 and _is_call(users[0], {fused_ops.add_linear}) and users[0].args[1] is item
            if is_added and layers[1][index] is None:
                sums[index] = users[0]
        first = min(sums.values(), key=order.__getitem__, default=merged)
        adapted = [index for index in sorted(sums) if order[sums[index].args[0]] < order[first]]
        if not adapted:
            continue
        nodes = [sums[index] for index in adapted]
        totals, ups = ([node.args[place] for node in nodes] for place in (0, 2))
        scalings = [node.args[3] if len(node.args) > 3 else 1 for node in nodes]
        with graph.inserting_before(first):
            call = (totals, inputs, [layers[0][index] for index in adapted], ups, scalings)
            _replace_by_items(nodes, graph.call_function(add_adapters, call))
        kept = [item for item in merged.users if item.users]
        with graph.inserting_before(merged):
            if kept:
                places = [item.args[1] for item in kept]
                arguments = [tuple(each[place] for place in places) for each in layers]
                _replace_by_items(kept, graph.call_function(fused_ops.merged_linear, (inputs, *arguments)))
        graph.eliminate_dead_code()


def _concat_linears(module: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """`_merge_linears` for torch's compiler: one product for each group of merged weights, found now, since a compiled
    graph cannot look where weights are. Layers with a bias are left to the compiler."""
    graph = module.graph
    value_of = dict(zip((node for node in graph.nodes if node.op == "placeholder"), inputs, strict=True))
    order = {node: index for index, node in enumerate(graph.nodes)}
    linears_of: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if _is_linear_without_bias(node) and node.args[1] in value_of:
            linears_of[node.args[0]].append(node)
    for source, linears in linears_of.items():
        linears.sort(key=lambda node: value_of[node.args[1]].data_ptr())  # a layer may call them in another order
        weights = [value_of[node.args[1]] for node in linears]
        for group in find_merged_groups(weights, [None] * len(weights)):
            if len(group.indices) == 1:
                continue
            nodes = [linears[index] for index in group.indices]
            with graph.inserting_before(min(nodes, key=order.__getitem__)):
                product = graph.call_function(concat_linear_op, (source, [node.args[1] for node in nodes]))
                parts = graph.call_method("split", (product, [len(weights[index]) for index in group.indices], -1))
                _replace_by_items(nodes, parts)
    module.recompile()


def _fuse_added_products(graph: fx.Graph, fused_ops: FusedOps) -> None:
    """Add products to a total in place: those of linear layers to the residual, those of adapters to their layer's.

    Requires that only norms read the total before, and that nothing reads it afterwards.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        pair = _match_binary(node, ADD)
        if pair is None:
            continue
        for total, term in (pair, pair[::-1]):
            before, after, products = _get_example(total), _get_example(node), _match_products(term, fused_ops)
            if not products or before is None or after is None or total.op == "get_attr":
                continue
            readers = [user for user in total.users if user is not node]
            if not all(_is_call(user, {fused_ops.rms_norm}) and order[user] < order[node] for user in readers):
                continue
            if _are_alike(before, after):
                with graph.inserting_before(node):
                    for product in products:
                        total = graph.call_function(fused_ops.add_linear, (total, *product))
                        total.meta, order[total] = dict(node.meta), order[node]
                    _replace_node(node, total)
                graph.eliminate_dead_code()
                break


def _match_products(node: Any, fused_ops: FusedOps) -> list[tuple[Any, ...]]:
    """The products that a node adds up, each input, weight and perhaps factor, if nothing else reads it; else []."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return []
    if _is_linear_without_bias(node):
        return [node.args[:2]]
    if _is_call(node, {fused_ops.add_linear}):
        first = _match_products(node.args[0], fused_ops)
        return [*first, node.args[1:]] if first else []
    pair = _match_binary(node, MUL)
    if pair is None or not isinstance(pair[1], float | int):
        return []
    return [(*each[:2], pair[1] * (each[2] if len(each) > 2 else 1)) for each in _match_products(pair[0], fused_ops)]


def _quantize_inputs(graph: fx.Graph, fused_ops: FusedOps, quantized: QuantizedOps) -> None:
    """Quantize the output of a norm where it is computed, if only products read it."""
    products = {fused_ops.merged_linear: 0, quantized.swiglu: 0, fused_ops.add_linear: 1}
    for node in graph.nodes:
        if not _is_call(node, {fused_ops.rms_norm}):
            continue
        if isinstance(node.args[0], fx.Node):
            _read_sizes_of_input(node, node.args[0])
        places = [(user.args, products.get(user.target)) for user in node.users if user.op == "call_function"]
        is_factor = [
            place is not None and [index for index, argument in enumerate(arguments) if argument is node] == [place]
            for arguments, place in places
        ]
        if node.users and len(is_factor) == len(node.users) and all(is_factor):
            node.target = quantized.rms_norm


def _read_sizes_of_input(norm: fx.Node, source: fx.Node) -> None:
    """Let nodes that read the size of a norm's output read the equal size of its input `source`."""
    for user in list(norm.users):
        if _is_call(user, {"size"}) or (_is_call(user, {getattr}) and user.args[1] == "shape"):
            user.replace_input_with(norm, source)


def _replace_by_items(nodes: Sequence[fx.Node], parts: fx.Node) -> None:
    items = [parts.graph.call_function(operator.getitem, (parts, index)) for index in range(len(nodes))]
    for node, item in zip(nodes, items, strict=True):
        _replace_node(node, item)


def _replace_node(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
