"""Recurrent layers under a plan: short convolutions (LFM2), the gated delta rule (Qwen3-Next, Qwen3.5) and Mamba 2
(Granite 4, Bamba, Nemotron-H, Falcon-H1).

A recurrent layer computes a token from a state that the tokens before it have left: the last inputs of a convolution, a
matrix for each head. The modeling code's own forward takes a row for one sequence, so `use_recurrent_plans` replaces it
where a plan is given. The plan's `SegmentTable` divides the row into segments, and says from which state each one
starts and where the state at its end goes. The same code is prefill and decode of the engine, which keeps states in the
slots of a pool, and the trainer's forward on packed rows and tries, where a segment starts from the end of its parent.

The gated delta rule, of one head with state S [K, V], for a token with query q, key k, value v, decay g and rate b:

    S <- exp(g) S;   S <- S + k d^T with d = b (v - S^T k);   o = S^T q

is computed in chunks of tokens. With G the sum of g in the chunk up to a token, D_ij = exp(G_i - G_j) for i >= j, and
A = tril(b k k^T D, -1), a chunk that starts from S has

    [U, W] = (I + A)^-1 [b v, b k exp(G)];   d = U - W S
    o = (q exp(G)) S + (q k^T D) d;   S <- exp(G_last) S + (k exp(G_last - G))^T d

Mamba 2 has d = v: its state takes no old value back. In its terms q is C, k is B, v is x dt and g is A dt.

All but the terms with S is computed for all chunks of the row at once. The number of chunks before it on its path is
the turn of a chunk; chunks of one turn, of all sequences and branches of the row, are computed together.

Axes: T tokens of the row, C channels, X rows of context and tokens, N chunks, L tokens of a chunk, H heads, K and V
sizes of a head's keys and values.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from tunesmith.model.arrays import copy_to_device
from tunesmith.model.forward import recurrent_ops as ops

MAX_CHUNK_TOKENS = 64
MAX_TAPS = 7
"""Most tokens before its own that a convolution reads."""
CONV, MATRIX = "conv", "matrix"
"""Names of a layer's states: the last inputs of its convolution [W - 1, C], and the matrices [H, K, V]."""
NORM_EPSILON = 1e-6
"""Added to the sum of squares of queries and keys."""

States = Mapping[int, Mapping[str, Tensor]]
"""The states of each layer, one per slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of a row that follow each other on one path."""

    start: int
    end: int
    parent: int | None = None
    """Index of the segment at whose end it starts; None: it starts a sequence, or from the state of `source`."""
    source: int | None = None
    """Slot of the state from which it starts."""
    targets: tuple[int, ...] = ()
    """Slots to which the state at its end goes."""


class _Gather(torch.autograd.Function):
    """Rows by index: 0 is a row of zeros, n the n-th row. No row is read twice, so the inverse index gathers the
    gradient; to add to rows by index would take longer."""

    @staticmethod
    def forward(ctx: Any, rows_THK: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _gather(rows_THK, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return _gather(grad, inverse), None, None


def _gather(rows_THK: Tensor, index: Tensor) -> Tensor:
    return functional.pad(rows_THK, (0, 0, 0, 0, 1, 0))[index]


def get_least_size(device: torch.device) -> int:
    """Of the axes of tables: torch traces a layer once more for an axis of size 1. On a CPU padding takes longer."""
    return 1 if device.type == "cpu" else 2


class StateTable:
    """From which states the tokens of a row start, and where the states after them go."""

    layer_states: Any = None
    """The states of the layer by name, if there are any."""

    def __init__(self, states: States | None) -> None:
        self.states = states

    def select_layer(self, layer: int) -> Self:
        """The same for one layer: it has no number, so that all layers share a traced graph."""
        table = copy.copy(self)
        table.states, table.layer_states = None, (self.states or {}).get(layer)
        return table


class SlotTable(StateTable):
    """Each token of a row starts from and ends in its slot; slots may change between two replays of a CUDA graph."""

    def __init__(self, slots_T: Tensor, states: States) -> None:
        super().__init__(states)
        self.slots_T = slots_T

    def convolve(self, inputs_TC: Tensor, conv: Any, *, has_silu: bool) -> Tensor:
        """See `SegmentTable`."""
        weights, states = (conv.weight.squeeze(1), conv.bias), self.layer_states[CONV]
        return ops.step_conv(inputs_TC, *weights, has_silu, states, self.slots_T)

    def apply_delta(self, module: Any, mixed_TC: Tensor, rate_TH: Tensor, step_TH: Tensor) -> Tensor:
        """See `SegmentTable`."""
        weights, states = (module.A_log, module.dt_bias, NORM_EPSILON), self.layer_states[MATRIX]
        return ops.step_delta(mixed_TC, rate_TH, step_TH, *weights, states, self.slots_T)

    def apply_rule(self, query_THK: Tensor, key_THK: Tensor, value_THV: Tensor, decay_TH: Tensor) -> Tensor:
        """See `SegmentTable`."""
        return ops.step_states(query_THK, key_THK, value_THV, decay_TH, self.layer_states[MATRIX], self.slots_T)


class SegmentTable(StateTable):
    """The segments of a row, which partition its first tokens; parents come before their children. The output of tokens
    after them, which pad the row, is not defined but finite."""

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        states: States | None = None,
        *,
        num_tokens: int | None = None,
    ) -> None:
        """Either all segments without a parent have a source, or none has one. `num_tokens` includes padding."""
        super().__init__(states)
        self._device = device
        if num_tokens is None:
            num_tokens = max((segment.end for segment in segments), default=0)
        least = get_least_size(device)
        sources = [each.source for each in segments if each.source is not None]
        self.sources_S = self._copy(sources * least if len(sources) == 1 else sources)
        self._build(segments, num_tokens, least)

    def convolve(self, inputs_TC: Tensor, conv: Any, *, has_silu: bool) -> Tensor:
        """The causal depthwise convolution [T, C] of a module, or its SiLU; computed in float32 or wider."""
        num_before = conv.weight.shape[2] - 1
        assert num_before <= MAX_TAPS, f"a convolution over {num_before + 1} tokens"
        context = [inputs_TC.new_zeros((1, inputs_TC.shape[1])), inputs_TC]
        if self.layer_states is not None:
            context.append(ops.read_states(self.layer_states[CONV], self.sources_S).transpose(0, 1).flatten(0, 1))
        context_XC = torch.cat(context)
        wide = torch.promote_types(inputs_TC.dtype, torch.float32)
        # wide before it is read by index, so that gradients are added in that type
        wide_XC, weight_WC = context_XC.to(wide), conv.weight.squeeze(1).to(wide).t()
        output_TC = inputs_TC.to(wide) * weight_WC[-1]
        for back in range(num_before):
            output_TC = output_TC + wide_XC[self.taps_WT[back, : len(inputs_TC)]] * weight_WC[-2 - back]
        if self.layer_states is not None:
            last_inputs = context_XC[self.tails_EW[:, MAX_TAPS - num_before :]]
            ops.write_states(self.layer_states[CONV], self.targets_E, last_inputs)
        output_TC = output_TC if conv.bias is None else output_TC + conv.bias.to(wide)
        return (functional.silu(output_TC) if has_silu else output_TC).to(inputs_TC.dtype)

    def apply_delta(self, module: Any, mixed_TC: Tensor, rate_TH: Tensor, step_TH: Tensor) -> Tensor:
        """Output [T, H, V] of the gated delta rule, in the inputs' type. These are queries, keys and values side by
        side, and rates and decays before their activations."""
        num_tokens, wide = len(mixed_TC), torch.promote_types(mixed_TC.dtype, torch.float32)
        query, key, value = mixed_TC.to(wide).split([module.key_dim, module.key_dim, module.value_dim], -1)
        query, key = (
            _normalize(each.view(num_tokens, -1, module.head_k_dim)).repeat_interleave(
                module.num_v_heads // module.num_k_heads, dim=1
            )
            for each in (query, key)
        )
        value = value.reshape(num_tokens, -1, module.head_v_dim)
        decay = -module.A_log.to(wide).exp() * functional.softplus(step_TH.to(wide) + module.dt_bias.to(wide))
        rate = rate_TH.sigmoid().to(wide)
        return self.apply_rule(query * module.head_k_dim**-0.5, key, value, decay, rate).to(mixed_TC.dtype)

    def apply_rule(
        self,
        query_THK: Tensor,
        key_THK: Tensor,
        value_THV: Tensor,
        decay_TH: Tensor,
        rate_TH: Tensor | None = None,
    ) -> Tensor:
        """Output [T, H, V] of the gated delta rule, without rates of Mamba 2; all inputs have the state's type."""
        index_P, place_T = self.index_NL.flatten(), self.place_T[: len(value_THV)]

        def divide(each_THK: Tensor) -> Tensor:
            gathered_PHK = _Gather.apply(each_THK, index_P, place_T)
            return gathered_PHK.unflatten(0, self.index_NL.shape).transpose(1, 2)

        query, key, value, decay_NHL1 = map(divide, (query_THK, key_THK, value_THV, decay_TH[:, :, None]))
        sums = decay_NHL1.cumsum(2)
        last, growth = sums[:, :, -1:], sums.exp()
        is_later_LL = torch.ones(sums.shape[2], sums.shape[2], dtype=torch.bool, device=sums.device).triu(1)
        decays_LL = (sums - sums.transpose(2, 3)).masked_fill(is_later_LL, -torch.inf).exp()
        scores, new, old = query @ key.transpose(2, 3) * decays_LL, value, None
        if rate_TH is not None:
            rate = divide(rate_TH[:, :, None])
            scaled = rate * key
            inverse_LL = ops.invert_unit_lower(scaled @ key.transpose(2, 3) * decays_LL)
            new, old = inverse_LL @ (rate * value), inverse_LL @ (scaled * growth)
        keys_KL = (key * (last - sums).exp()).transpose(2, 3)
        initial = value.new_zeros((1, value.shape[1], key.shape[3], value.shape[3]))
        if self.layer_states is not None:
            initial = ops.read_states(self.layer_states[MATRIX], self.sources_S)
        states, deltas, ended = ops.scan_chunks(
            initial, new, old, last.exp(), keys_KL, self.turns_U2, self.parents_N, self.ends_E
        )
        if self.layer_states is not None:
            ops.write_states(self.layer_states[MATRIX], self.targets_E, ended)
        output = (query * growth) @ states + scores @ (new if old is None else deltas)
        return _Gather.apply(output.transpose(1, 2).flatten(0, 1), place_T, index_P)

    def _copy(self, values: Sequence[Any] | np.ndarray) -> Tensor:
        return copy_to_device(np.asarray(values, dtype=np.int64), self._device)

    def _build(self, segments: Sequence[Segment], num_tokens: int, least: int) -> None:
        longest = max((segment.end - segment.start for segment in segments), default=1)
        size = max(least, min(MAX_CHUNK_TOKENS, 1 << (longest - 1).bit_length()))
        turns: list[list[tuple[int, int, int]]] = []  # parent in the turn before, first token, end
        lasts: list[tuple[int, int]] = []  # of each segment the turn of its last chunk, and its place in the turn
        taps_TW = np.zeros((num_tokens, MAX_TAPS), dtype=np.int64)
        histories: list[np.ndarray] = []  # of each segment, where its last inputs are
        num_sources, num_roots = len(self.sources_S), 0
        for segment in segments:
            turn, parent, history = -1, 0, np.zeros(MAX_TAPS, dtype=np.int64)  # before a sequence there are zeros
            if segment.parent is not None:
                (turn, parent), history = lasts[segment.parent], histories[segment.parent]
            elif segment.source is not None:
                # from the end of the context, for layers whose convolutions differ in length
                parent, history = num_roots, num_roots - np.arange(MAX_TAPS, 0, -1) * num_sources
                num_roots += 1
            path = np.concatenate([history, np.arange(segment.start + 1, segment.end + 1)])
            windows = np.lib.stride_tricks.sliding_window_view(path[:-1], MAX_TAPS)
            taps_TW[segment.start : segment.end] = windows[:, ::-1]
            histories.append(path[-MAX_TAPS:])
            for start in range(segment.start, segment.end, size):
                turn += 1
                if turn == len(turns):
                    turns.append([])
                turns[turn].append((parent, start, min(start + size, segment.end)))
                parent = len(turns[turn]) - 1
            lasts.append((turn, parent))
        turns += [[] for _ in range(least - len(turns))]
        if sum(map(len, turns)) < least:
            turns[0] += [(0, 0, 0)] * (least - len(turns[0]))
        ends = [(*lasts[index], slot, index) for index, segment in enumerate(segments) for slot in segment.targets]
        ends = sorted(ends * least if len(ends) == 1 else ends)
        num_ends = Counter(turn for turn, *_ in ends)
        chunks = [chunk for turn in turns for chunk in turn]
        index_NL = np.zeros((len(chunks), size), dtype=np.int64)
        place_T = np.zeros(num_tokens, dtype=np.int64)
        for place, (_, start, end) in enumerate(chunks):
            index_NL[place, : end - start] = np.arange(start + 1, end + 1)
            place_T[start:end] = np.arange(end - start) + place * size + 1
        self.index_NL, self.place_T = self._copy(index_NL), self._copy(place_T)
        self.turns_U2 = torch.tensor([(len(each), num_ends[turn]) for turn, each in enumerate(turns)]).view(-1, 2)
        self.parents_N, self.taps_WT = self._copy([parent for parent, *_ in chunks]), self._copy(taps_TW.T)
        self.ends_E, self.targets_E = (self._copy([each[column] for each in ends]) for column in (1, 2))
        self.tails_EW = self._copy(np.reshape([histories[index] for *_, index in ends], (-1, MAX_TAPS)))


Table = SlotTable | SegmentTable


def list_sequences(lengths: Sequence[int]) -> list[Segment]:
    """Segments of sequences of these lengths, laid end to end."""
    ends = np.cumsum(lengths).tolist()
    return [Segment(start=end - length, end=end) for length, end in zip(lengths, ends, strict=True)]


def _run_short_conv(module: Any, hidden_TC: Tensor, table: Table) -> Tensor:
    before, after, inputs = module.in_proj(hidden_TC).chunk(3, dim=-1)
    return module.out_proj(after * table.convolve(before * inputs, module.conv, has_silu=False))


def _run_gated_delta(module: Any, hidden_TC: Tensor, table: Table) -> Tensor:
    num_tokens, size = len(hidden_TC), module.head_v_dim
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next: interleaved by head
        projected = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden_TC)[None], module.in_proj_ba(hidden_TC)[None]
        )
        query, key, value, gate, rate, step = (each[0] for each in projected)
        mixed = torch.cat([each.reshape(num_tokens, -1) for each in (query, key, value)], -1)
    else:
        mixed, gate = module.in_proj_qkv(hidden_TC), module.in_proj_z(hidden_TC).view(num_tokens, -1, size)
        rate, step = module.in_proj_b(hidden_TC), module.in_proj_a(hidden_TC)
    mixed = table.convolve(mixed, module.conv1d, has_silu=True)
    output_THV = table.apply_delta(module, mixed, rate, step)
    normed = module.norm(output_THV.reshape(-1, size), gate.reshape(-1, size))
    return module.out_proj(normed.view(num_tokens, -1))


def _run_mamba2(module: Any, hidden_TC: Tensor, table: Table) -> Tensor:
    num_tokens, num_heads = len(hidden_TC), module.num_heads
    projected = module.in_proj(hidden_TC * getattr(module, "ssm_in_multiplier", 1.0))
    if hasattr(module, "mup_vector"):  # of Falcon-H1, as is the multiplier
        projected = projected * module.mup_vector[0]
    gate, mixed, step = projected.split([module.intermediate_size, module.conv_dim, num_heads], -1)
    has_silu = module.activation in ("silu", "swish")
    mixed = table.convolve(mixed, module.conv1d, has_silu=has_silu)
    mixed = mixed if has_silu else module.act(mixed)
    wide = torch.promote_types(hidden_TC.dtype, torch.float32)
    size = module.n_groups * module.ssm_state_size
    inputs, key, query = mixed.to(wide).split([module.intermediate_size, size, size], -1)
    query, key = (
        each.view(num_tokens, module.n_groups, -1).repeat_interleave(num_heads // module.n_groups, dim=1)
        for each in (query, key)
    )
    inputs_THV = inputs.reshape(num_tokens, num_heads, -1)
    step_TH = functional.softplus(step.to(wide) + module.dt_bias.to(wide)).clamp(*module.time_step_limit)
    decay_TH = -module.A_log.to(wide).exp() * step_TH
    output_THV = table.apply_rule(query, key, inputs_THV * step_TH[:, :, None], decay_TH)
    output_TC = (output_THV + module.D.to(wide)[:, None] * inputs_THV).flatten(1)
    if isinstance(module.norm, nn.Identity):
        normed = output_TC * functional.silu(gate.to(wide))
    else:
        normed = module.norm(output_TC[None], gate[None])[0]
    return module.out_proj(normed.to(hidden_TC.dtype))


def _normalize(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPSILON)


KINDS: Mapping[str, Callable[[Any, Tensor, Table], Tensor]] = {
    "Lfm2ShortConv": _run_short_conv,
    "Lfm2MoeShortConv": _run_short_conv,
    "Qwen3NextGatedDeltaNet": _run_gated_delta,
    "Qwen3_5GatedDeltaNet": _run_gated_delta,
    "Qwen3_5MoeGatedDeltaNet": _run_gated_delta,
    **dict.fromkeys(("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), _run_mamba2),
}
"""Forwards under a plan by the name of transformers' class."""
RECURRENT_MODELS = (
    "lfm2", "lfm2_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text",
    "granitemoehybrid", "bamba", "nemotron_h", "falcon_h1",
)  # fmt: skip
"""Model types whose recurrent layers are all of these kinds."""
RECURRENT_TYPES = ("conv", "linear_attention")
"""Their layer types, as in a configuration."""
HYBRID = "hybrid"
"""Type of a layer with attention beside a recurrent layer (Falcon-H1)."""
STATELESS_TYPES = ("mlp", "moe")
"""Types of layers that see one token at a time (Nemotron-H)."""


def is_recurrent(config: PretrainedConfig) -> bool:
    """Whether a supported model has recurrent layers."""
    return not {*RECURRENT_TYPES, HYBRID}.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or ())


def list_recurrent(model: nn.Module) -> list[Any]:
    """The modules of recurrent layers, in order."""
    return [module for module in model.modules() if type(module).__name__ in KINDS]


def use_recurrent_plans(model: nn.Module) -> None:
    """Make recurrent layers take their segments from a plan, if one is passed; idempotent."""
    for module in list(model.modules()):
        if hasattr(module, "runs_plans"):
            continue
        if type(module).__name__ in KINDS:
            module.__class__ = _build_class(type(module))  # type: ignore[arg-type]  # classes are hashable
        elif type(module).__name__ in ("Lfm2DecoderLayer", "Lfm2MoeDecoderLayer"):
            module.__class__ = _build_layer_class(type(module))  # type: ignore[arg-type]


@cache  # one class for all layers, which are traced once
def _build_layer_class(original: Any) -> type[nn.Module]:
    """A decoder layer that passes its plan as `seq_idx`: transformers 5.17 passes nothing else to convolutions."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original.forward(self, *args, **kwargs | {"seq_idx": kwargs.get("attention_plan")})

    return type(original.__name__, (original,), {"forward": forward, "runs_plans": True})


@cache
def _build_class(original: Any) -> type[nn.Module]:
    """A subclass: replacements of the instance's `forward`, such as those of the engine, leave it in place."""
    run = KINDS[original.__name__]

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plan = kwargs.get("attention_plan", kwargs.get("seq_idx"))
        if plan is None:
            return original.forward(self, hidden_states, *args, **kwargs)
        table = plan.segments
        if table.states is not None:
            table = table.select_layer(self.layer_idx)
        return run(self, hidden_states[0], table)[None]

    return type(original.__name__, (original,), {"forward": forward, "runs_plans": True})


def describe_states(model: nn.Module) -> dict[int, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Shape and type of each recurrent layer's states, by layer."""
    described = {}
    for module in list_recurrent(model):
        weight = getattr(module, "conv1d" if hasattr(module, "conv1d") else "conv").weight
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            CONV: ((weight.shape[2] - 1, weight.shape[0]), weight.dtype)
        }
        if hasattr(module, "A_log"):
            shapes[MATRIX] = (_get_matrix_shape(module), torch.promote_types(weight.dtype, torch.float32))
        described[module.layer_idx] = shapes
    return described


def _get_matrix_shape(module: Any) -> tuple[int, int, int]:
    """[H, K, V]"""
    if hasattr(module, "ssm_state_size"):
        return module.num_heads, module.ssm_state_size, module.head_dim
    return module.num_v_heads, module.head_k_dim, module.head_v_dim


def count_state_bytes(model: nn.Module) -> int:
    """Bytes of the recurrent states of one sequence; 0 for a model without recurrent layers."""
    shapes = [each for states in describe_states(model).values() for each in states.values()]
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes)


def count_saved_values(model: nn.Module) -> list[int]:
    """Float32 values for each token that the backward pass of each layer with matrices needs: inputs of the convolution
    by tap, heads before and after products, matrices of a chunk, and its states."""
    layers = [each for each in list_recurrent(model) if hasattr(each, "A_log")]
    return [
        (each.conv_kernel_size + 2) * each.conv_dim
        + num_heads * (8 * size_k + 6 * size_v + 5 * MAX_CHUNK_TOKENS)
        + 2 * num_heads * size_k * size_v // MAX_CHUNK_TOKENS
        for each, (num_heads, size_k, size_v) in zip(layers, map(_get_matrix_shape, layers), strict=True)
    ]
