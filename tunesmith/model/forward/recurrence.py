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

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from tunesmith.model.arrays import copy_to_device

MAX_CHUNK_TOKENS = 64
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


@dataclass(frozen=True, slots=True)
class _Turn:
    """The chunks of one turn."""

    chunks: slice
    parents: Tensor | None
    """Their predecessors among the chunks of the turn before; None: each has the one of the same index, or none."""
    ends: Tensor | None
    """Those of them after which the state goes to `targets`; None: all."""
    targets: Tensor | None


class SegmentTable:
    """The segments of a row, which partition its first `num_tokens` tokens; parents come before their children."""

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        states: States | None = None,
        slots: Tensor | None = None,
    ) -> None:
        """Either all segments without a parent have a source, or none has one. With `slots`, on the device, each token
        is a segment that starts from and ends in its slot; they may change between two forwards of a CUDA graph."""
        self.num_tokens = max((segment.end for segment in segments), default=0)
        self._segments, self._device, self._states = segments, device, states or {}
        sources = [each.source for each in segments if each.source is not None]
        targets = [slot for each in segments for slot in each.targets]
        self._sources, self._targets = (self._copy(each) if slots is None else slots for each in (sources, targets))
        self._has_kernel = slots is not None and device.type == "cuda"
        self._taps: dict[int, tuple[Tensor, Tensor]] = {}
        self._chunks: tuple[Tensor, Tensor, list[_Turn]] | None = None

    def convolve(self, layer: int, inputs_TC: Tensor, weight_CW: Tensor, bias: Tensor | None) -> Tensor:
        """The causal depthwise convolution [T, C], in float32 or wider."""
        num_before = weight_CW.shape[1] - 1
        if num_before not in self._taps:
            self._taps[num_before] = self._build_taps(num_before)
        taps_WT, tails = self._taps[num_before]
        context = [inputs_TC.new_zeros((1, inputs_TC.shape[1])), inputs_TC]
        if len(self._sources):
            context.insert(1, self._states[layer][CONV][self._sources].flatten(0, 1))
        context_XC = torch.cat(context)
        wide = torch.promote_types(inputs_TC.dtype, torch.float32)
        weight_WC = weight_CW.to(wide).t()
        output_TC = inputs_TC.to(wide) * weight_WC[-1]
        for back, index_T in enumerate(taps_WT, 2):
            output_TC = output_TC + context_XC[index_T].to(wide) * weight_WC[-back]
        if len(self._targets):
            last_inputs = context_XC[tails].unflatten(0, (-1, num_before))
            self._states[layer][CONV].index_copy_(0, self._targets, last_inputs)
        return output_TC if bias is None else output_TC + bias.to(wide)

    def apply_rule(
        self,
        layer: int,
        query_THK: Tensor,
        key_THK: Tensor,
        value_THV: Tensor,
        decay_TH: Tensor,
        rate_TH: Tensor | None,
    ) -> Tensor:
        """Output [T, H, V] of the gated delta rule, without rates of Mamba 2; all inputs have the state's type."""
        if self._has_kernel and value_THV.dtype == torch.float32:
            from tunesmith.model.kernels.delta_step import step_states  # needs Triton

            states = self._states[layer][MATRIX]
            return step_states(query_THK, key_THK, value_THV, decay_TH, rate_TH, states=states, slots_T=self._sources)
        if self._chunks is None:
            self._chunks = self._build_chunks()
        index_NL, place_T, turns = self._chunks

        def divide(each_TH: Tensor) -> Tensor:
            each = each_TH.view(*each_TH.shape[:2], -1)
            return functional.pad(each, (0, 0, 0, 0, 0, 1))[index_NL].transpose(1, 2)

        query, key, value, decay_NHL1 = map(divide, (query_THK, key_THK, value_THV, decay_TH))
        sums = decay_NHL1.cumsum(2)
        last, growth = sums[:, :, -1:], sums.exp()
        is_later_LL = torch.ones(sums.shape[2], sums.shape[2], dtype=torch.bool, device=sums.device).triu(1)
        decays_LL = (sums - sums.transpose(2, 3)).masked_fill(is_later_LL, -torch.inf).exp()
        keys_KL = key.transpose(2, 3)
        scores, readers, new = query @ keys_KL * decays_LL, query * growth, value
        if rate_TH is not None:
            rate = divide(rate_TH)
            scaled = rate * key
            solved = torch.linalg.solve_triangular(
                (scaled @ keys_KL * decays_LL).tril(-1),
                torch.cat([rate * value, scaled * growth], 3),
                upper=False,
                unitriangular=True,
            )
            new, old = solved.split([value.shape[3], key.shape[3]], 3)
            readers = torch.cat([old, readers], 2)
        keys_KL, growth = (key * (last - sums).exp()).transpose(2, 3), last.exp()
        if len(self._sources):
            state = self._states[layer][MATRIX][self._sources]
        else:
            state = value.new_zeros((turns[0].chunks.stop, value.shape[1], key.shape[3], value.shape[3]))
        outputs = []
        for turn in turns:
            here = turn.chunks
            if turn.parents is not None:
                state = state[turn.parents]
            *known, output = (readers[here] @ state).split(query.shape[2], 2)
            delta = new[here] - known[0] if known else new[here]
            outputs.append(output + scores[here] @ delta)
            state = growth[here] * state + keys_KL[here] @ delta
            if turn.targets is not None:
                ends = state if turn.ends is None else state[turn.ends]
                self._states[layer][MATRIX].index_copy_(0, turn.targets, ends)
        return torch.cat(outputs).transpose(1, 2).flatten(0, 1)[place_T]

    def _copy(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return copy_to_device(np.asarray(values, dtype=np.int64), self._device)

    def _build_taps(self, num_before: int) -> tuple[Tensor, Tensor]:
        """Indices of X, which are a row of zeros, the tails of the sources and the tokens: the inputs before each token
        [W - 1, T], nearest first, and the last inputs of each target."""
        first_tail, first_token = 1, 1 + len(self._sources) * num_before
        taps_TW = np.zeros((self.num_tokens, num_before), dtype=np.int64)
        histories, tails = list[np.ndarray](), list[np.ndarray]()
        for segment in self._segments:
            history = np.zeros(num_before, dtype=np.int64)  # before a sequence there are zeros
            if segment.parent is not None:
                history = histories[segment.parent]
            elif segment.source is not None:
                history, first_tail = np.arange(first_tail, first_tail + num_before), first_tail + num_before
            path = np.concatenate([history, np.arange(segment.start, segment.end) + first_token])
            windows = np.lib.stride_tricks.sliding_window_view(path[:-1], num_before)
            taps_TW[segment.start : segment.end] = windows[:, ::-1]
            histories.append(path[len(path) - num_before :])
            tails += [histories[-1]] * len(segment.targets)
        return self._copy(taps_TW.T.copy()), self._copy(np.concatenate(tails) if tails else [])

    def _build_chunks(self) -> tuple[Tensor, Tensor, list[_Turn]]:
        """The token in each place of the chunks [N, L], T where there is none; the place of each token; the turns."""
        longest = max(segment.end - segment.start for segment in self._segments)
        size = min(MAX_CHUNK_TOKENS, 1 << (longest - 1).bit_length())
        turns: list[list[tuple[int, int, int]]] = []  # parent in the turn before, first token, end
        lasts: list[tuple[int, int]] = []  # of each segment the turn of its last chunk, and its place in the turn
        ends: list[list[tuple[int, int]]] = []  # place in the turn, target
        for segment in self._segments:
            turn, parent = (-1, -1) if segment.parent is None else lasts[segment.parent]
            for start in range(segment.start, segment.end, size):
                turn += 1
                if turn == len(turns):
                    turns.append([])
                    ends.append([])
                turns[turn].append((parent, start, min(start + size, segment.end)))
                parent = len(turns[turn]) - 1
            lasts.append((turn, parent))
        target = 0
        for segment, (turn, place) in zip(self._segments, lasts, strict=True):
            ends[turn] += [(place, target + index) for index in range(len(segment.targets))]
            target += len(segment.targets)
        index_NL = np.full((sum(map(len, turns)), size), self.num_tokens, dtype=np.int64)
        place_T = np.zeros(self.num_tokens, dtype=np.int64)
        built, first = [], 0
        for turn, chunks in enumerate(turns):
            for chunk, (_, start, end) in enumerate(chunks, first):
                index_NL[chunk, : end - start] = np.arange(start, end)
                place_T[start:end] = chunk * size + np.arange(end - start)
            parents, here = [parent for parent, _, _ in chunks], list(range(len(chunks)))
            is_same = turn == 0 or (parents == here and len(turns[turn - 1]) == len(chunks))
            places, targets = [place for place, _ in ends[turn]], [target for _, target in ends[turn]]
            is_all = targets == list(range(len(self._targets)))
            built.append(
                _Turn(
                    slice(first, first + len(chunks)),
                    None if is_same else self._copy(parents),
                    None if places == here else self._copy(places),
                    (self._targets if is_all else self._targets[self._copy(targets)]) if targets else None,
                )
            )
            first += len(chunks)
        return self._copy(index_NL), self._copy(place_T), built


def list_sequences(lengths: Sequence[int]) -> list[Segment]:
    """Segments of sequences of these lengths, laid end to end."""
    ends = np.cumsum(lengths).tolist()
    return [Segment(start=end - length, end=end) for length, end in zip(lengths, ends, strict=True)]


def _run_short_conv(module: Any, hidden_TC: Tensor, table: SegmentTable) -> Tensor:
    before, after, inputs = module.in_proj(hidden_TC).chunk(3, dim=-1)
    mixed = table.convolve(module.layer_idx, before * inputs, module.conv.weight.squeeze(1), module.conv.bias)
    return module.out_proj(after * mixed.to(hidden_TC.dtype))


def _run_gated_delta(module: Any, hidden_TC: Tensor, table: SegmentTable) -> Tensor:
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
    mixed = functional.silu(
        table.convolve(module.layer_idx, mixed, module.conv1d.weight.squeeze(1), module.conv1d.bias)
    ).to(hidden_TC.dtype)
    wide = torch.promote_types(hidden_TC.dtype, torch.float32)
    query, key, value = mixed.to(wide).split([module.key_dim, module.key_dim, module.value_dim], -1)
    query, key = (
        _normalize(each.view(num_tokens, -1, module.head_k_dim)).repeat_interleave(
            module.num_v_heads // module.num_k_heads, dim=1
        )
        for each in (query, key)
    )
    decay = -module.A_log.to(wide).exp() * functional.softplus(step.to(wide) + module.dt_bias.to(wide))
    output_THV = table.apply_rule(
        module.layer_idx,
        query * module.head_k_dim**-0.5,
        key,
        value.reshape(num_tokens, -1, size),
        decay,
        rate.sigmoid().to(wide),
    )
    normed = module.norm(output_THV.to(hidden_TC.dtype).reshape(-1, size), gate.reshape(-1, size))
    return module.out_proj(normed.view(num_tokens, -1))


def _run_mamba2(module: Any, hidden_TC: Tensor, table: SegmentTable) -> Tensor:
    num_tokens, num_heads = len(hidden_TC), module.num_heads
    projected = module.in_proj(hidden_TC * getattr(module, "ssm_in_multiplier", 1.0))
    if hasattr(module, "mup_vector"):  # of Falcon-H1, as is the multiplier
        projected = projected * module.mup_vector[0]
    gate, mixed, step = projected.split([module.intermediate_size, module.conv_dim, num_heads], -1)
    mixed = module.act(table.convolve(module.layer_idx, mixed, module.conv1d.weight.squeeze(1), module.conv1d.bias)).to(
        hidden_TC.dtype
    )
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
    output_THV = table.apply_rule(module.layer_idx, query, key, inputs_THV * step_TH[:, :, None], decay_TH, None)
    output_TC = (output_THV + module.D.to(wide)[:, None] * inputs_THV).flatten(1)
    if isinstance(module.norm, nn.Identity):
        normed = output_TC * functional.silu(gate.to(wide))
    else:
        normed = module.norm(output_TC[None], gate[None])[0]
    return module.out_proj(normed.to(hidden_TC.dtype))


def _normalize(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPSILON)


KINDS: Mapping[str, Callable[[Any, Tensor, SegmentTable], Tensor]] = {
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


_plan: ContextVar[Any] = ContextVar("plan", default=None)
"""The plan of the decoder layer that runs: some versions of transformers do not pass it on to recurrent layers."""


def list_recurrent(model: nn.Module) -> list[Any]:
    """The modules of recurrent layers, in order."""
    return [module for module in model.modules() if type(module).__name__ in KINDS]


def use_recurrent_plans(model: nn.Module) -> None:
    """Make recurrent layers take their segments from a plan, if one is passed; idempotent."""
    for module in list(model.modules()):
        if hasattr(module, "runs_plans"):
            continue
        if type(module).__name__ in KINDS:
            module.__class__ = _build_class(type(module))
        elif any(type(child).__name__ in KINDS for child in module.children()):
            module.__class__ = _build_layer_class(type(module))


def _build_layer_class(original: type[nn.Module]) -> type[nn.Module]:
    """A decoder layer that keeps its plan for its recurrent layer, also when its backward computes it again."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        token = _plan.set(kwargs.get("attention_plan"))
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            _plan.reset(token)

    return type(original.__name__, (original,), {"forward": forward, "runs_plans": True})


def _build_class(original: type[nn.Module]) -> type[nn.Module]:
    """A subclass: replacements of the instance's `forward`, such as those of the engine, leave it in place."""
    run = KINDS[original.__name__]

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plan = _plan.get()
        if plan is None:
            return original.forward(self, hidden_states, *args, **kwargs)
        table = plan.segments
        output_TC = run(self, hidden_states[0, : table.num_tokens], table)
        return functional.pad(output_TC, (0, 0, 0, hidden_states.shape[1] - table.num_tokens))[None]

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
