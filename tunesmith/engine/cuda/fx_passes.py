"""A traced transformer layer -> the same layer in fewer, larger steps.

torch traces the unchanged modelling code of a layer into a graph; here the parts that most decoders share are found in
it by their arithmetic, not by their names: RMS norm, rotary embedding before attention, linear layers of one input,
SiLU-gated products, a product added to the residual. A graph in which nothing but such parts, views and plain products
is left can be run as it stands. Any other is handed back, for a compiler to deal with.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from tunesmith.engine.cuda import custom_ops as ops
from tunesmith.engine.cuda.custom_ops import Prologue

MUL = {operator.mul, torch.mul, "mul"}
ADD = {operator.add, torch.add, "add"}
NEG = {operator.neg, torch.neg, "neg"}
LINEAR = {functional.linear, torch._C._nn.linear}
VIEWS = {operator.getitem, "view", "reshape", "transpose", "contiguous", "unsqueeze", "to", "size", getattr}
ATTENTION = {ops.paged_decode, ops.paged_prefill}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFunctions:
    """What a rewritten layer calls."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    """Input, weight of the last axis, epsilon; the output has the weight's type, and the input may be wider."""
    multiply: Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], Sequence[Tensor]]
    """One input times several weights, plus their biases: one output each."""
    gate: Callable[[Tensor, Tensor, Tensor], Tensor]
    """SiLU of the input times the first weight, times the input times the second."""
    add_product: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Add input times weight to the first tensor, which may be wider, in place."""
    decode: Callable[..., Tensor]
    """`ops.paged_decode` with a `Prologue` as its last argument."""
    prefill: Callable[..., Tensor]
    """`ops.paged_prefill` with a `Prologue` as its last argument."""


def rewrite_layer(module: fx.GraphModule, functions: LayerFunctions) -> bool:
    """Rewrite a traced layer in place; False when parts are left that only a compiler makes fast."""
    graph = module.graph
    _replace_norms(graph, functions)
    _replace_attention(graph, functions)
    _replace_gates(graph, functions)
    _replace_groups(graph, functions)
    _replace_residuals(graph, functions)
    graph.eliminate_dead_code()
    known = {*VIEWS, *LINEAR, *MUL, *ADD, *ATTENTION, build_prologue}
    known.update(getattr(functions, name) for name in LayerFunctions.__slots__)
    is_known = all(node.target in known for node in graph.nodes if node.op in ("call_function", "call_method"))
    if is_known:
        graph.lint()
        module.recompile()
    return is_known


def build_prologue(
    cos_1TD: Tensor, sin_1TD: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, epsilon: float
) -> Prologue:
    return Prologue(
        cos_1TD=cos_1TD, sin_1TD=sin_1TD, query_norm_D=query_norm, key_norm_D=key_norm, epsilon=epsilon
    )  # fmt: skip


def _is_call(node: Any, targets: Iterable[Any]) -> bool:
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in targets


def _get_tensor(node: Any) -> Tensor | None:
    """What the node was when the layer was traced."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _strip(node: Any, targets: Iterable[Any]) -> Any:
    """The first input of a call of one of the targets; any other node as it is."""
    return node.args[0] if _is_call(node, targets) else node


def _split(node: Any, targets: Iterable[Any]) -> tuple[Any, Any] | None:
    """The two arguments of a call of one of the targets."""
    return (node.args[0], node.args[1]) if _is_call(node, targets) and len(node.args) == 2 and not node.kwargs else None


def _replace_norms(graph: fx.Graph, functions: LayerFunctions) -> None:
    for node in list(graph.nodes):
        found = _match_norm(node)
        if found is not None and _ends_in_type_of(node, found[1]):
            with graph.inserting_before(node):
                _replace(node, graph.call_function(functions.norm, found))


def _match_norm(node: Any) -> tuple[Any, Any, float] | None:
    """Input, weight and epsilon of `weight * (x / sqrt(mean(x^2) + epsilon))`, with x in float32."""
    pair = _split(node, MUL)
    if pair is None:
        return None
    for weight, normed in (pair, pair[::-1]):
        tensor = _get_tensor(weight)
        product = _split(_strip(normed, {"to"}), MUL)
        if tensor is None or tensor.dim() != 1 or product is None:
            continue
        for wide, inverse in (product, product[::-1]):
            total = _split(_strip(inverse, {torch.rsqrt, "rsqrt"}), ADD)
            if total is None or not isinstance(total[1], float) or not _is_mean_square(total[0], wide):
                continue
            return _strip(wide, {"to"}), weight, total[1]
    return None


def _ends_in_type_of(node: fx.Node, other: Any) -> bool:
    """The node has the type of the other one, or all that reads it narrows it to that first."""
    value, wanted = _get_tensor(node), _get_tensor(other)
    if value is None or wanted is None:
        return False
    is_narrowed = [_is_call(user, {"to"}) and user.args[1:] == (wanted.dtype,) for user in node.users]
    return value.dtype == wanted.dtype or all(is_narrowed)


def _is_mean_square(node: Any, wide: Any) -> bool:
    if not _is_call(node, {torch.mean, "mean"}) or node.args[1:] != (-1,) or node.kwargs != {"keepdim": True}:
        return False
    return _split(node.args[0], {torch.pow, "pow", operator.pow}) == (wide, 2)


def _replace_attention(graph: fx.Graph, functions: LayerFunctions) -> None:
    for node in list(graph.nodes):
        if not _is_call(node, ATTENTION):
            continue
        query, key, *rest = node.args
        turned_query, turned_key = _match_rotary(query), _match_rotary(key)
        if turned_query is None or turned_key is None or turned_query[1:] != turned_key[1:]:
            continue
        query, cos, sin = turned_query
        key = turned_key[0]
        norms: tuple[Any, Any, float] = (None, None, 0.0)
        normed_query, normed_key = _match_normed_heads(query, functions), _match_normed_heads(key, functions)
        function = functions.decode if node.target is ops.paged_decode else functions.prefill
        with graph.inserting_before(node):
            if normed_query and normed_key and normed_query[2] == normed_key[2]:
                norms = (normed_query[1], normed_key[1], normed_query[2])
                query, key = (graph.call_method("transpose", (heads[0], 1, 2)) for heads in (normed_query, normed_key))
            prologue = graph.call_function(build_prologue, (cos, sin, *norms))
            _replace(node, graph.call_function(function, (query, key, *rest, prologue)))


def _match_rotary(node: Any) -> tuple[Any, Any, Any] | None:
    """Heads [1, H, T, D], cosine and sine [1, T, D] of `heads * cos + rotate_half(heads) * sin`."""
    terms = _split(node, ADD)
    first, second = (None, None) if terms is None else (_split(term, MUL) for term in terms)
    if first is None or second is None:
        return None
    (heads, cos), (rotated, sin) = first, second
    if not _is_rotated(rotated, heads) or not _is_call(cos, {"unsqueeze"}) or not _is_call(sin, {"unsqueeze"}):
        return None
    tensor = _get_tensor(heads)
    if tensor is None or cos.args[1:] != (1,) or sin.args[1:] != (1,):
        return None
    angles = [_get_tensor(table.args[0]) for table in (cos, sin)]
    if any(angle is None or angle.shape[0] != 1 or angle.shape[-1] != tensor.shape[-1] for angle in angles):
        return None
    return heads, cos.args[0], sin.args[0]


def _is_rotated(node: Any, heads: Any) -> bool:
    """The second half of each head, negated, before the first half."""
    if not _is_call(node, {torch.cat}):
        return False
    parts, axis = node.args[0], node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    tensor = _get_tensor(heads)
    if tensor is None or axis != -1 or len(parts) != 2 or not _is_call(parts[0], NEG):
        return False
    half = tensor.shape[-1] // 2
    second, first = _split(parts[0].args[0], {operator.getitem}), _split(parts[1], {operator.getitem})
    return second == (heads, (Ellipsis, slice(half, None, None))) and first == (
        heads,
        (Ellipsis, slice(None, half, None)),
    )


def _match_normed_heads(node: Any, functions: LayerFunctions) -> tuple[Any, Any, float] | None:
    """Heads [1, T, H, D], weight and epsilon, where the heads were normed and then transposed."""
    if not _is_call(node, {"transpose"}) or node.args[1:] != (1, 2) or not _is_call(node.args[0], {functions.norm}):
        return None
    heads, weight, epsilon = node.args[0].args
    return heads, weight, epsilon


def _replace_gates(graph: fx.Graph, functions: LayerFunctions) -> None:
    for node in list(graph.nodes):
        pair = _split(node, MUL)
        if pair is None or not _is_call(pair[0], {functional.silu, torch.nn.functional.silu}):
            continue
        gate, value = pair[0].args[0], pair[1]
        if not all(_is_plain_linear(part) and len(part.users) == 1 for part in (gate, value)):
            continue
        if gate.args[0] is value.args[0]:
            with graph.inserting_before(node):
                arguments = (gate.args[0], gate.args[1], value.args[1])
                _replace(node, graph.call_function(functions.gate, arguments))
    graph.eliminate_dead_code()


def _is_plain_linear(node: Any) -> bool:
    """Linear without a bias."""
    return _is_call(node, LINEAR) and (len(node.args) < 3 or node.args[2] is None) and not node.kwargs


def _replace_groups(graph: fx.Graph, functions: LayerFunctions) -> None:
    """Multiply one input by all its weights at once."""
    linears_of: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if _is_call(node, LINEAR) and not node.kwargs:
            linears_of[node.args[0]].append(node)
    for inputs, linears in linears_of.items():
        if len(linears) < 2:
            continue
        weights: tuple[Any, ...] = tuple(node.args[1] for node in linears)
        biases = tuple(node.args[2] if len(node.args) > 2 else None for node in linears)
        if not all(weight.op in ("placeholder", "get_attr") for weight in weights):
            continue
        with graph.inserting_before(linears[0]):
            outputs = graph.call_function(functions.multiply, (inputs, weights, biases))
            parts = [graph.call_function(operator.getitem, (outputs, index)) for index in range(len(linears))]
        for node, part in zip(linears, parts, strict=True):
            _replace(node, part)


def _replace_residuals(graph: fx.Graph, functions: LayerFunctions) -> None:
    """Let a product add itself to the residual, where only norms have read that, and nothing reads it afterwards."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        pair = _split(node, ADD)
        if pair is None:
            continue
        for residual, product in (pair, pair[::-1]):
            before, after = _get_tensor(residual), _get_tensor(node)
            if not _is_plain_linear(product) or len(product.users) != 1 or before is None or after is None:
                continue
            readers = [user for user in residual.users if user is not node]
            if not all(_is_call(user, {functions.norm}) and order[user] < order[node] for user in readers):
                continue
            is_alike = before.shape == after.shape and before.dtype == after.dtype
            if is_alike and residual.op != "get_attr":
                with graph.inserting_before(node):
                    _replace(node, graph.call_function(functions.add_product, (residual, *product.args[:2])))
                break


def _replace(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)
