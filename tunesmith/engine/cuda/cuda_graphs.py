"""Decoding as CUDA graphs: many tokens of many requests without the host.

A graph holds one step of a bucket of requests: the model with paged decode attention, the head, the draw, and the
step's own bookkeeping, so replaying it again decodes the next token. A launch queues the inputs, the draw of rows that
were just prefilled, a block of replays and the copy of what they drew, and returns at once. The last token of each row
stays on the device, where the next launch finds it: launches may follow each other before any is read. Weights are
updated in place, so graphs stay valid. Rows that have ended, or are only padding, write into a scratch page that
nothing reads.

Axes: S slots (the most rows), R rows of a launch, L lines of a log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.engine.batch.decode_burst import BurstInput, BurstOutput
from tunesmith.engine.batch.input_batch import InputBatch
from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import LayeredPlan, build_decode_plan, build_prefill_plan
from tunesmith.engine.cuda.kernels.draw import Rows, draw_tokens
from tunesmith.engine.cuda.kernels.functions import FUNCTIONS
from tunesmith.engine.cuda.kernels.paged_prefill import get_tile_tokens
from tunesmith.engine.cuda.layer_fusion import FusedLayers
from tunesmith.engine.cuda.merged_weights import lay_side_by_side
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.logits import compute_logits

MAX_BLOCK = 64
"""Steps that can be launched at once; a request that ends within a block wastes the rest of it."""
NUM_LINES = MAX_BLOCK + 1
"""Of one launch's log: the first token of fresh rows, and a block."""
NUM_HALVES = 2
"""Launches whose inputs and logs are kept apart: one may be queued while another is read."""
BUCKETS = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


@dataclass(frozen=True, slots=True)
class DeviceTicket:
    """One launch in the device's queue."""

    event: torch.cuda.Event
    log: Tensor
    num_steps: int
    num_rows: int

    def read(self) -> BurstOutput:
        self.event.synchronize()
        log = self.log.numpy()[:, : self.num_steps + 1, : self.num_rows]
        return BurstOutput(log[0], log[1].view(np.float32))


class DecodeGraphs:
    """The captured steps of one model, one for each bucket of requests, made when first needed."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        fused: FusedLayers | None,
    ) -> None:
        """The last page of the cache is the scratch page; without fused layers the model runs as it is."""
        device = model.device
        self._model, self._cache, self._fused = model, cache, fused
        self._num_slots = max_num_seqs
        num_columns = count_columns(max_model_len, cache.block_size)
        self.input_batch = InputBatch(max_num_seqs, num_columns=num_columns, scratch_block=len(cache.keys[0]) - 1)
        self._inputs = _RowInputs.allocate(max_num_seqs, device=device)
        self._table = torch.zeros((max_num_seqs, num_columns), dtype=torch.int32, device=device)
        self._log = torch.zeros((NUM_HALVES, 2, NUM_LINES, max_num_seqs), dtype=torch.int32, device=device)
        lines = self._log.view(-1, max_num_seqs)
        self._rows = Rows(
            ids_R=torch.zeros(max_num_seqs, dtype=torch.long, device=device),
            positions_R=self._inputs.positions_S,
            seeds_R=self._inputs.seeds_S,
            temperatures_R=self._inputs.temperatures_S,
            top_ks_R=self._inputs.top_ks_S,
            top_ps_R=self._inputs.top_ps_S,
            min_ps_R=self._inputs.min_ps_S,
            lines_R=self._inputs.lines_S,
            token_log_LR=lines,
            logprob_log_LR=lines.view(torch.float32)[NUM_LINES:],
        )
        config = model.config.get_text_config()
        num_groups = config.num_attention_heads // min(cache.keys[0].shape[1], config.num_attention_heads)
        self._tile_tokens = get_tile_tokens(num_groups)
        self._stages = [_Stage(self) for _ in range(NUM_HALVES)]
        self._half = 0
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        self._pointers = self._get_pointers()

    @torch.inference_mode()
    def launch(self, rows: BurstInput, *, num_steps: int) -> DeviceTicket:
        """Queue a block; `num_steps` may be 0 when only fresh rows are to be drawn."""
        assert 0 <= num_steps <= MAX_BLOCK
        num_rows = len(rows.slots_R)
        size, has_cuts = self._choose_size(num_rows), bool(self.input_batch.has_truncation_S[rows.slots_R].any())
        graph = self._get_graph(size, has_cuts) if num_steps else None
        self._half = (self._half + 1) % NUM_HALVES
        stage = self._stages[self._half]
        stage.event.synchronize()  # it is read by now, unless a failure came in between
        stage.fill(self.input_batch, rows, size=size, first_line=self._half * 2 * NUM_LINES)
        self._load(stage, size)
        self._draw_fresh(rows, has_cuts)
        for _ in range(num_steps):
            assert graph is not None
            graph.replay()
        stage.log.copy_(self._log[self._half], non_blocking=True)
        stage.event.record()
        return DeviceTicket(stage.event, stage.log, num_steps, num_rows)

    def build_prefill_plan(self, spans: Sequence[Span]) -> LayeredPlan:
        return build_prefill_plan(self._cache, spans, tile_tokens=self._tile_tokens, device=self._model.device)

    def installed(self) -> AbstractContextManager[None]:
        return nullcontext() if self._fused is None else self._fused.installed()

    def refresh(self) -> None:
        """Drop the graphs if parameters have moved in memory; what is updated in place stays valid."""
        if self._get_pointers() != self._pointers:
            self._graphs.clear()
            self._memory = torch.cuda.graph_pool_handle()  # the pool went with its last graph
            if self._fused is not None:
                lay_side_by_side(self._model)
            self._pointers = self._get_pointers()

    def _get_pointers(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._model.parameters()]

    def _load(self, stage: _Stage, size: int) -> None:
        self._inputs.copy_(stage.inputs)
        self._table[:size].copy_(stage.table[:size], non_blocking=True)
        sources, ids = self._inputs.sources_S, self._rows.ids_R
        ids.copy_(torch.where(sources < 0, self._inputs.token_ids_S, ids[sources.clamp(min=0)]))

    def _draw_fresh(self, rows: BurstInput, has_cuts: bool) -> None:
        first = len(rows.slots_R) - rows.num_prefilled
        for hidden_NC in rows.prefill_hidden:
            chosen = self._rows.narrow(first, first + len(hidden_NC))
            draw_tokens(compute_logits(self._model, hidden_NC), chosen, has_cuts=has_cuts)
            first += len(hidden_NC)

    def _choose_size(self, num_rows: int) -> int:
        size = next((size for size in BUCKETS if size >= num_rows), self._num_slots)
        return max(min(size, self._num_slots), num_rows)

    def _get_graph(self, size: int, has_cuts: bool) -> torch.cuda.CUDAGraph:
        if (size, has_cuts) not in self._graphs:
            self._graphs[size, has_cuts] = self._capture(size, has_cuts)
        return self._graphs[size, has_cuts]

    def _capture(self, size: int, has_cuts: bool) -> torch.cuda.CUDAGraph:
        """Capture a step on rows of padding, when the device has nothing else to do."""
        torch.cuda.synchronize()
        kept = self._rows.ids_R.clone()
        self._stages[self._half].pad(0, size)
        self._load(self._stages[self._half], size)
        rows = self._rows.narrow(0, size)
        plan = build_decode_plan(self._cache, self._table[:size], rows.positions_R)

        def run_step() -> None:
            hidden_RC = run_body(self._model, rows.ids_R[None], rows.positions_R[None], plan)[0]
            draw_tokens(compute_logits(self._model, hidden_RC), rows, has_cuts=has_cuts)

        with self.installed():
            graph = record(run_step, self._memory)
        self._rows.ids_R.copy_(kept)
        return graph


def record(run_step: Callable[[], None], memory: Any) -> torch.cuda.CUDAGraph:
    """Run a step twice to warm up, then capture it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run_step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, pool=memory):
        run_step()
    return graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowInputs:
    """What a captured step reads of each row, by name; fields of one type share a matrix, and two copies move all."""

    integers_6S: Tensor
    floats_3S: Tensor
    sources_S: Tensor
    """Row of the launch before that drew the last token; -1: `token_ids_S` has it."""
    token_ids_S: Tensor
    positions_S: Tensor
    seeds_S: Tensor
    lines_S: Tensor
    """The log's line of a token, less its position."""
    top_ks_S: Tensor
    temperatures_S: Tensor
    top_ps_S: Tensor
    min_ps_S: Tensor

    @classmethod
    def allocate(cls, num_slots: int, **options: Any) -> _RowInputs:
        """Rows of padding; `options` are those of `torch.zeros`."""
        integers_6S = torch.zeros((6, num_slots), dtype=torch.long, **options)
        floats_3S = torch.ones((3, num_slots), **options)
        return cls(
            integers_6S=integers_6S,
            floats_3S=floats_3S,
            sources_S=integers_6S[0],
            token_ids_S=integers_6S[1],
            positions_S=integers_6S[2],
            seeds_S=integers_6S[3],
            lines_S=integers_6S[4],
            top_ks_S=integers_6S[5],
            temperatures_S=floats_3S[0],
            top_ps_S=floats_3S[1],
            min_ps_S=floats_3S[2],
        )

    def copy_(self, other: _RowInputs) -> None:
        """Copy all fields of another, without waiting."""
        self.integers_6S.copy_(other.integers_6S, non_blocking=True)
        self.floats_3S.copy_(other.floats_3S, non_blocking=True)


class _Stage:
    """One launch's inputs and log in memory of the host that the device copies from and to by itself."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self.inputs = _RowInputs.allocate(graphs._num_slots, pin_memory=True)
        self.table, self.log = (
            torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in (graphs._table, graphs._log[0])
        )
        self.event = torch.cuda.Event()
        """The launch is over."""
        self._scratch_block = graphs.input_batch.scratch_block

    def fill(self, batch: InputBatch, rows: BurstInput, *, size: int, first_line: int) -> None:
        """Describe a launch; rows beyond its requests are padding."""
        slots_R, num_rows = rows.slots_R, len(rows.slots_R)
        self.pad(num_rows, size)
        inputs = self.inputs
        inputs.sources_S.numpy()[:num_rows] = rows.sources_R
        inputs.token_ids_S.numpy()[:num_rows] = rows.token_ids_R
        inputs.positions_S.numpy()[:num_rows] = rows.positions_R
        inputs.seeds_S.numpy()[:num_rows] = batch.seeds_S[slots_R]
        lines_S = inputs.lines_S.numpy()
        lines_S[:num_rows] = first_line - rows.positions_R
        lines_S[num_rows - rows.num_prefilled : num_rows] -= 1
        inputs.top_ks_S.numpy()[:num_rows] = batch.top_ks_S[slots_R]
        inputs.temperatures_S.numpy()[:num_rows] = batch.temperatures_S[slots_R]
        inputs.top_ps_S.numpy()[:num_rows] = batch.top_ps_S[slots_R]
        inputs.min_ps_S.numpy()[:num_rows] = batch.min_ps_S[slots_R]
        np.take(batch.block_table_SP, slots_R, axis=0, out=self.table.numpy()[:num_rows], mode="clip")

    def pad(self, first: int, last: int) -> None:
        """Make rows of no consequence."""
        self.inputs.integers_6S.numpy()[:, first:last] = 0
        self.inputs.sources_S.numpy()[first:last] = -1
        self.inputs.floats_3S.numpy()[:, first:last] = 1.0
        self.inputs.min_ps_S.numpy()[first:last] = 0.0
        self.table.numpy()[first:last] = self._scratch_block


def count_columns(max_model_len: int, page_size: int) -> int:
    """Columns of the page table, with room for what is decoded after a request has ended."""
    return -(-(max_model_len + 2 * MAX_BLOCK) // page_size) + 1


def build_graphs(
    model: PreTrainedModel, cache: KVCache, *, max_num_seqs: int, max_model_len: int, is_compiled: bool
) -> DecodeGraphs:
    """Graphs of the model as it is, or of its layers in fewer steps."""
    fused = None
    if is_compiled:
        lay_side_by_side(model)
        max_positions = count_columns(max_model_len, cache.block_size) * cache.block_size
        fused = FusedLayers(model, FUNCTIONS, max_positions=max_positions)
    return DecodeGraphs(model, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len, fused=fused)
