"""Decoding with CUDA graphs: bursts of decode steps without host synchronization.

A graph holds one decode step for one batch size: the model with paged decode attention, the head, sampling, and the
update of positions, so each replay decodes the next token. A launch enqueues the inputs, sampling for just-prefilled
rows, a burst of replays and the device-to-host copy of the sampled tokens, and returns at once. Each row's last token
stays on the device for the next launch, so a launch need not wait until the one before is read. Weights are updated in
place, so graphs stay valid. Finished rows and padding rows write to a scratch block that nothing reads.

Axes: S slots (the maximum number of rows), R rows of a launch, L lines of the token log.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.engine.batch.decode_burst import BurstInput, BurstOutput, InputBatch
from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import LayeredPlan, build_decode_plan, build_prefill_plan
from tunesmith.engine.cuda.decode_work import DecodeWork, Divider, Kind, find_slots, get_num_sms
from tunesmith.engine.cuda.forward_graphs import GraphContext, HiddenGraphs, PrefillGraphs, choose_capture_size
from tunesmith.engine.cuda.fp8_weights import Fp8Weights
from tunesmith.engine.cuda.kernels.layer_ops import CUDA_OPS
from tunesmith.engine.cuda.kernels.paged_decode import list_items
from tunesmith.engine.cuda.kernels.sample import SamplingTensors, log_trainer_logprobs, sample_next_tokens
from tunesmith.engine.cuda.layer_fusion import FusedLayers
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.graph_store import CapturedGraph, GraphStore
from tunesmith.model.forward.logits import compute_logits
from tunesmith.model.kernels.span_attention import count_tile_rows, get_tile_tokens
from tunesmith.model.merged_weights import merge_weights
from tunesmith.model.torch_modes import is_exact

MAX_BURST_STEPS = 64
"""Most steps per launch; a request that finishes within a burst wastes the rest of it."""
LOG_LINES = MAX_BURST_STEPS + 1
"""Log lines per launch: the first token of prefilled rows, then one line per step."""
NUM_LOGS = 3
"""Token ids, logprobs, entropies; the last are written and copied only if a row of the launch asks for them."""
NUM_BUFFERS = 2
"""Double buffering: one launch may be queued while the results of another are read."""


@dataclass(frozen=True, slots=True)
class CudaBurstHandle:
    """A launch in the device's queue and the host copy of its token log."""

    event: torch.cuda.Event
    log: Tensor
    num_steps: int
    num_rows: int
    has_entropies: bool

    def read(self) -> BurstOutput:
        """Wait for the burst; the arrays are valid until two more bursts are launched."""
        self.event.synchronize()
        log = self.log.numpy()[:, : self.num_steps + 1, : self.num_rows]
        return BurstOutput(log[0], log[1].view(np.float32), log[2].view(np.float32) if self.has_entropies else None)


class DecodeGraphs:
    """Prefills and decodes without synchronizing; each batch size has a captured decode step, captured on first use."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        is_compiled: bool,
        fp8: Fp8Weights | None,
    ) -> None:
        """The cache's last block is the scratch block. With `is_compiled` the model's layers run fused; `fp8` is the
        copy that they read, to be refreshed with the weights."""
        device = model.device
        self._model, self._cache, self._fp8 = model, cache, fp8
        self._num_slots = max_num_seqs
        # with the tokens that are decoded after a request has finished
        num_columns = -(-(max_model_len + 2 * MAX_BURST_STEPS) // cache.block_size) + 1
        scratch_block = len(cache.keys[0]) - 1
        self._fused: FusedLayers | None = None
        if is_compiled:
            merge_weights(model)
            ops = CUDA_OPS if fp8 is None else fp8.ops
            self._fused = FusedLayers(model, ops, max_positions=num_columns * cache.block_size)
        self.input_batch = InputBatch(max_num_seqs, num_columns=num_columns, scratch_block=scratch_block)
        self._inputs = _StepInputs.allocate(max_num_seqs, device=device)
        self._block_table = torch.zeros((max_num_seqs, num_columns), dtype=torch.int32, device=device)
        self._division_7S = torch.zeros((7, max_num_seqs), dtype=torch.int32, device=device)
        self._log = torch.zeros((NUM_BUFFERS, NUM_LOGS, LOG_LINES, max_num_seqs), dtype=torch.int32, device=device)
        log_lines = self._log.view(-1, max_num_seqs)
        self._sampling = SamplingTensors(
            ids_R=torch.zeros(max_num_seqs, dtype=torch.long, device=device),
            positions_R=self._inputs.positions_S,
            seeds_R=self._inputs.seeds_S,
            temperatures_R=self._inputs.temperatures_S,
            top_ks_R=self._inputs.top_ks_S,
            top_ps_R=self._inputs.top_ps_S,
            min_ps_R=self._inputs.min_ps_S,
            log_lines_R=self._inputs.log_lines_S,
            token_log_LR=log_lines,
            logprob_log_LR=log_lines.view(torch.float32)[LOG_LINES:],
            entropy_log_LR=log_lines.view(torch.float32)[2 * LOG_LINES :],
        )
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        num_kv_heads = min(keys.shape[1] for keys in cache.keys if keys.shape[1])  # tiles must cover every layer
        num_rows = min(count_tile_rows(keys.shape[3], keys.dtype) for keys in cache.keys if keys.shape[1])
        self._context = GraphContext(
            model=model,
            cache=cache,
            num_slots=max_num_seqs,
            num_columns=num_columns,
            scratch_block=scratch_block,
            tile_tokens=get_tile_tokens(num_heads // min(num_kv_heads, num_heads), num_rows),
            divider=Divider(
                block_size=cache.block_size,
                num_kv_heads=num_kv_heads,
                num_heads=num_heads,
                head_size=cache.attended_keys.shape[3],
                num_sms=get_num_sms(device),
                window=getattr(config, "sliding_window", None) or 0,
            ),
            installed=self.installed,
        )
        self._staging = [_StagingBuffers(self) for _ in range(NUM_BUFFERS)]
        self._buffer = 0
        self._graphs: GraphStore[Any] = GraphStore(model)
        """Keys: the number of rows, whether some row is truncated, whether some row asks for entropies, and how
        attention is divided. Values: the items of attention, which each replay lists again."""
        self._hidden_graphs: HiddenGraphs | None = None
        """Graphs for requests that the host samples; built when the first one comes."""
        self._prefill_graphs: PrefillGraphs | None = None

    @torch.inference_mode()
    def launch(self, rows: BurstInput, *, num_steps: int) -> CudaBurstHandle:
        """Enqueue a burst; `num_steps` 0 only samples the first token of prefilled rows."""
        assert 0 <= num_steps <= MAX_BURST_STEPS
        num_rows = len(rows.slots_R)
        size = choose_capture_size(num_rows, self._num_slots)
        has_truncation = bool(self.input_batch.has_truncation_S[rows.slots_R].any())
        has_entropies = bool(self.input_batch.has_entropy_S[rows.slots_R].any())
        table_RP = self.input_batch.block_table_SP[rows.slots_R]
        division = self._context.divider.divide(table_RP, rows.positions_R, num_steps=num_steps)
        # first, since a capture overwrites the buffers into which this launch's inputs go
        key = (size, has_truncation, has_entropies, division.kind)
        graph = (self._graphs.find(key) or self._capture(*key)) if num_steps else None
        self._buffer = (self._buffer + 1) % NUM_BUFFERS
        staging = self._staging[self._buffer]
        staging.event.synchronize()  # its last launch has been read, unless an error occurred in between
        staging.fill(self.input_batch, rows, size=size, first_log_line=self._buffer * NUM_LOGS * LOG_LINES)
        # Inputs, first tokens, steps and the copy of the log are queued on one stream, so they run in this order, and
        # after the launch before. The host waits for nothing here.
        division.copy_to(self._division_7S, staging.division)
        self._copy_inputs(staging, size)
        self._sample_prefilled(rows, has_truncation, has_entropies)
        for _ in range(num_steps):
            assert graph is not None
            graph.replay()
        num_logs = NUM_LOGS if has_entropies else NUM_LOGS - 1
        staging.log[:num_logs].copy_(self._log[self._buffer, :num_logs], non_blocking=True)
        staging.event.record()
        return CudaBurstHandle(staging.event, staging.log, num_steps, num_rows, has_entropies)

    def compute_hidden(self, spans: Sequence[Span], token_ids: Sequence[int]) -> Tensor:
        """Queue one decode step of requests that the host samples: hidden states [R, C] of one token of each, valid
        until the next call."""
        if self._hidden_graphs is None:
            self._hidden_graphs = HiddenGraphs(self._context)
        return self._hidden_graphs.compute(spans, token_ids)

    def prefill(self, spans: Sequence[Span], token_ids: NDArray[np.int64], last_tokens: Sequence[int]) -> Tensor | None:
        """Queue the forward of spans in one row: hidden states [N, C] of the tokens at the places `last_tokens`; None
        if it is not faster than the model's own forward, or if layers are recurrent."""
        if self._cache.states:
            return None
        if self._prefill_graphs is None:
            self._prefill_graphs = PrefillGraphs(self._context)
        if not self._prefill_graphs.can_compute(len(token_ids), len(spans)):
            return None
        return self._prefill_graphs.compute(spans, token_ids, last_tokens)

    def build_prefill_plan(self, spans: Sequence[Span]) -> LayeredPlan:
        """Attention of the new tokens of several requests in one flat row."""
        return build_prefill_plan(self._cache, spans, tile_tokens=self._context.tile_tokens, device=self._model.device)

    def installed(self) -> AbstractContextManager[None]:
        """Within, the model's layers run fused."""
        return nullcontext() if self._fused is None else self._fused.installed()

    def refresh(self) -> None:
        """Quantize FP8 weights again; drop the graphs if parameters have moved. In-place updates keep graphs valid."""
        if self._graphs.has_moved():
            if self._fused is not None:
                merge_weights(self._model)  # which moves them once more
            if self._fp8 is not None:
                self._fp8.rebuild()
            # their kernels read the addresses of the old parameters
            self._graphs.clear()
            self._hidden_graphs = self._prefill_graphs = None
        elif self._fp8 is not None:
            self._fp8.refresh()

    def _copy_inputs(self, staging: _StagingBuffers, size: int) -> None:
        self._inputs.copy_(staging.inputs)
        self._block_table[:size].copy_(staging.block_table[:size], non_blocking=True)
        sources, ids = self._inputs.sources_S, self._sampling.ids_R
        # Rows move up when others end. A row takes its last token from the place where the burst before, which the host
        # may not have read yet, has left it.
        ids.copy_(torch.where(sources < 0, self._inputs.token_ids_S, ids[sources.clamp(min=0)]))

    def _sample_prefilled(self, rows: BurstInput, has_truncation: bool, has_entropies: bool) -> None:
        first = len(rows.slots_R) - rows.num_prefilled
        for hidden_NC in rows.prefill_hidden:
            prefilled_rows = self._sampling.narrow(first, first + len(hidden_NC))
            self._sample(hidden_NC, prefilled_rows, has_truncation, has_entropies)
            first += len(hidden_NC)

    def _sample(self, hidden_RC: Tensor, rows: SamplingTensors, has_truncation: bool, has_entropies: bool) -> None:
        logits_RV = compute_logits(self._model, hidden_RC)
        sample_next_tokens(logits_RV, rows, has_truncation=has_truncation, has_entropies=has_entropies)
        if is_exact():
            log_trainer_logprobs(logits_RV, rows)

    def _capture(self, size: int, has_truncation: bool, has_entropies: bool, kind: Kind) -> CapturedGraph[Any]:
        """Capture a step on padding rows while the device is idle."""
        # the last launch may still copy from the pinned staging buffer, which is padded now
        torch.cuda.synchronize()
        # warm-up and capture sample for padding rows, over the last tokens that the next launch needs
        saved_ids = self._sampling.ids_R.clone()
        staging = self._staging[self._buffer]
        staging.pad(0, size)
        self._copy_inputs(staging, size)
        self._context.divider.build_empty(kind).copy_to(self._division_7S, staging.division)
        rows = self._sampling.narrow(0, size)
        table_RP = self._block_table[:size]
        work = DecodeWork.allocate(self._context.divider, kind, rows.positions_R, self._division_7S)
        plan = build_decode_plan(self._cache, table_RP, work, self._inputs.slots_S[:size])

        def run_step() -> tuple[DecodeWork, LayeredPlan]:
            list_items(work)
            hidden_RC = run_body(self._model, rows.ids_R[None], rows.positions_R[None], plan)[0]
            if self._cache.routes is not None:
                self._cache.routes.store(find_slots(table_RP, rows.positions_R, self._cache.block_size))
            self._sample(hidden_RC, rows, has_truncation, has_entropies)
            return work, plan  # nothing else holds these tensors, whose addresses are in the graph

        with self.installed():
            graph = self._graphs.capture((size, has_truncation, has_entropies, kind), run_step)
        self._sampling.ids_R.copy_(saved_ids)
        return graph


@dataclass(frozen=True, slots=True)
class _StepInputs:
    """Per-row inputs of a captured step. Fields of one dtype are the rows of one matrix, in this order, so two copies
    transfer them all."""

    integers_7S: Tensor
    floats_3S: Tensor
    sources_S: Tensor
    """Row of the previous launch that samples this row's last token; -1: `token_ids_S` holds it."""
    token_ids_S: Tensor
    positions_S: Tensor
    seeds_S: Tensor
    log_lines_S: Tensor
    """A token's line of the log is this plus its position."""
    top_ks_S: Tensor
    slots_S: Tensor
    """Slots of recurrent states; that of padding is one more than requests have."""
    temperatures_S: Tensor
    top_ps_S: Tensor
    min_ps_S: Tensor

    @classmethod
    def allocate(cls, num_slots: int, **options: Any) -> _StepInputs:
        """Padding rows; `options` are passed to `torch.zeros` and `torch.ones`."""
        integers_7S = torch.zeros((7, num_slots), dtype=torch.long, **options)
        floats_3S = torch.ones((3, num_slots), **options)
        return cls(integers_7S, floats_3S, *integers_7S.unbind(), *floats_3S.unbind())

    def copy_(self, other: _StepInputs) -> None:
        """Copy all fields of `other` without synchronizing."""
        self.integers_7S.copy_(other.integers_7S, non_blocking=True)
        self.floats_3S.copy_(other.floats_3S, non_blocking=True)


class _StagingBuffers:
    """One launch's inputs and token log in pinned host memory."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self.inputs = _StepInputs.allocate(graphs._num_slots, pin_memory=True)
        self.block_table, self.division, self.log = (
            torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            for tensor in (graphs._block_table, graphs._division_7S, graphs._log[0])
        )
        self.event = torch.cuda.Event()
        """Recorded after the launch's last copy."""
        self._scratch_block = graphs.input_batch.scratch_block

    def fill(self, batch: InputBatch, rows: BurstInput, *, size: int, first_log_line: int) -> None:
        """Write a launch's inputs; rows beyond its requests become padding."""
        slots_R, num_rows = rows.slots_R, len(rows.slots_R)
        self.pad(num_rows, size)
        inputs = self.inputs
        inputs.sources_S.numpy()[:num_rows] = rows.sources_R
        inputs.token_ids_S.numpy()[:num_rows] = rows.token_ids_R
        inputs.positions_S.numpy()[:num_rows] = rows.positions_R
        inputs.slots_S.numpy()[:num_rows] = slots_R
        inputs.seeds_S.numpy()[:num_rows] = batch.seeds_S[slots_R]
        inputs.top_ks_S.numpy()[:num_rows] = batch.top_ks_S[slots_R]
        inputs.temperatures_S.numpy()[:num_rows] = batch.temperatures_S[slots_R]
        inputs.top_ps_S.numpy()[:num_rows] = batch.top_ps_S[slots_R]
        inputs.min_ps_S.numpy()[:num_rows] = batch.min_ps_S[slots_R]
        log_lines_S = inputs.log_lines_S.numpy()
        log_lines_S[:num_rows] = first_log_line - rows.positions_R
        log_lines_S[num_rows - rows.num_prefilled : num_rows] -= 1
        np.take(batch.block_table_SP, slots_R, axis=0, out=self.block_table.numpy()[:num_rows], mode="clip")

    def pad(self, first: int, last: int) -> None:
        """Turn rows `first` to `last - 1` into padding."""
        self.inputs.integers_7S.numpy()[:, first:last] = 0
        self.inputs.sources_S.numpy()[first:last] = -1
        self.inputs.slots_S.numpy()[first:last] = len(self.inputs.slots_S)
        self.inputs.floats_3S.numpy()[:, first:last] = 1.0
        self.inputs.min_ps_S.numpy()[first:last] = 0.0
        self.block_table.numpy()[first:last] = self._scratch_block
