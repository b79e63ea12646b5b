"""A burst decoder on a CPU, for tests of `AsyncStepper`.

Like a GPU it computes all rows of a launch, those of ended requests included, in launch order, and returns the tokens
of a launch only when they are read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from engines import build_engine
from tunesmith.engine.batch.decode_burst import BurstInput, BurstOutput, InputBatch
from tunesmith.engine.batch.kv_cache import PagedAttentionPlan
from tunesmith.engine.batch.sampler import sample_tokens
from tunesmith.engine.core.span import BlockRun, Span, extend_runs
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.worker.model_runner import ModelRunner
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.logits import compute_logits
from tunesmith.types import Distribution

MAX_BURST = 64


@dataclass
class HostBurstHandle:
    output: BurstOutput
    is_read: bool = False

    def read(self) -> BurstOutput:
        self.is_read = True
        return self.output


class HostBurstDecoder:
    """Has the methods of `tunesmith.engine.cuda.cuda_graphs.DecodeGraphs` that the engine calls."""

    def __init__(self, runner: ModelRunner, *, max_num_seqs: int, max_model_len: int) -> None:
        cache = runner.cache
        shapes = [(keys.shape[0], keys.shape[1] + 1, *keys.shape[2:]) for keys in cache.keys]
        runner.cache.keys = [torch.zeros(shape) for shape in shapes]
        runner.cache.values = [torch.zeros(shape) for shape in shapes]
        self._model, self._cache = runner.model, runner.cache
        num_columns = (max_model_len + 2 * MAX_BURST) // cache.block_size + 2
        self.input_batch = InputBatch(
            max_num_seqs, num_columns=num_columns, scratch_block=self._cache.keys[0].shape[1] - 1
        )
        self._ids: list[int] = []
        self.handles: list[HostBurstHandle] = []
        self.max_unread = 0
        self.num_single_steps = 0

    def launch(self, rows: BurstInput, *, num_steps: int) -> HostBurstHandle:
        num_rows, num_decoding = len(rows.slots_R), len(rows.slots_R) - rows.num_prefilled
        known = zip(rows.sources_R, rows.token_ids_R, strict=True)
        ids = [self._ids[source] if source >= 0 else int(token_id) for source, token_id in known]
        positions = rows.positions_R.copy()
        table = self.input_batch.block_table_SP[rows.slots_R].copy()
        tokens = np.full((num_steps + 1, num_rows), -7, dtype=np.int32)
        logprobs = np.full((num_steps + 1, num_rows), np.nan, dtype=np.float32)
        entropies = np.full((num_steps + 1, num_rows), np.nan, dtype=np.float32)
        if rows.num_prefilled:
            self._sample(
                torch.cat(list(rows.prefill_hidden)),
                rows,
                range(num_decoding, num_rows),
                positions,
                ids,
                0,
                tokens,
                logprobs,
                entropies,
            )
        for step in range(num_steps):
            hidden = []
            for row in range(num_rows):
                start = int(positions[row])
                slot = int(rows.slots_R[row])
                plan = self.build_prefill_plan(
                    [
                        Span(
                            0,
                            start,
                            start + 1,
                            table[row].tolist(),
                            source=slot if self._cache.states else None,
                            slot=slot,
                        )
                    ]
                )
                body = run_body(self._model, torch.tensor([[ids[row]]]), torch.tensor([[start]]), plan)
                hidden.append(body[0])
            self._sample(
                torch.cat(hidden), rows, range(num_rows), positions, ids, step + 1, tokens, logprobs, entropies
            )
        self._ids = ids
        has_entropies = self.input_batch.has_entropy_S[rows.slots_R].any()
        self.handles.append(HostBurstHandle(BurstOutput(tokens, logprobs, entropies if has_entropies else None)))
        self.max_unread = max(self.max_unread, sum(not handle.is_read for handle in self.handles))
        return self.handles[-1]

    def _sample(self, hidden_NC, rows, selected, positions, ids, line, tokens, logprobs, entropies) -> None:
        slots = rows.slots_R[list(selected)]
        distributions = [
            Distribution(
                temperature=float(self.input_batch.temperatures_S[slot]), top_k=int(self.input_batch.top_ks_S[slot]),
                top_p=float(self.input_batch.top_ps_S[slot]), min_p=float(self.input_batch.min_ps_S[slot]),
            )
            for slot in slots
        ]  # fmt: skip
        seeds, next_positions = self.input_batch.seeds_S[slots].tolist(), [int(positions[row]) + 1 for row in selected]
        logits_NV = compute_logits(self._model, hidden_NC).float()
        sampled = sample_tokens(logits_NV, distributions, seeds, next_positions, has_entropies=True)
        for index, row in enumerate(selected):
            ids[row] = tokens[line, row] = sampled.token_ids[index]
            logprobs[line, row] = sampled.logprobs[index]
            entropies[line, row] = sampled.entropies[index]
            positions[row] += 1

    def compute_hidden(self, spans: Sequence[Span], token_ids: Sequence[int]) -> torch.Tensor:
        self.num_single_steps += 1
        assert all(span.stop - span.start == 1 for span in spans)
        hidden = [
            run_body(
                self._model, torch.tensor([[token_id]]), torch.tensor([[span.start]]),
                self.build_prefill_plan([dataclasses.replace(span, first=0, runs=[])]),
            )[0]
            for span, token_id in zip(spans, token_ids, strict=True)
        ]  # fmt: skip
        return torch.cat(hidden)

    def prefill(self, spans: Sequence[Span], token_ids: object, last_tokens: Sequence[int]) -> None:
        return None

    def build_prefill_plan(self, spans: Sequence[Span]) -> PagedAttentionPlan:
        return PagedAttentionPlan(self._cache, [_find_runs(span) for span in spans], torch.device("cpu"))

    def installed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def refresh(self) -> None:
        pass


def _find_runs(span: Span) -> Span:
    """Set the runs, which the PyTorch plan needs; kernels read block tables only."""
    runs: list[BlockRun] = []
    extend_runs(runs, span.blocks)
    return dataclasses.replace(span, runs=runs)


def build_burst_engine(model: str = "llama", *, max_model_len: int = 128, **settings: object) -> LocalEngine:
    """An engine that decodes in bursts."""
    engine = build_engine(model, max_model_len=max_model_len, **settings)
    engine._runner._cpu_layers = None
    engine._runner.has_graphs = True
    engine._runner._burst_decoder = HostBurstDecoder(
        engine._runner, max_num_seqs=engine._settings.max_num_seqs, max_model_len=max_model_len
    )
    engine._output_processor, engine._stepper = engine._build_stepper()
    return engine
