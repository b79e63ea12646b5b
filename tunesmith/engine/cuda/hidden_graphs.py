"""One decode step as a CUDA graph that ends before the head, for requests that the host samples token by token.

Requests with penalties, a grammar, a logit bias or top logprobs need the host between two tokens. Their forward is
replayed as a graph per batch size, as in bursts; head and sampling follow outside of it. The inputs are separate from
those of bursts, because a burst may be in the device's queue, and its last tokens are the input of the next one.

Axes: S slots (the maximum number of rows), R rows of a step, P columns of the block table, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tunesmith.engine.core.span import Span
from tunesmith.engine.cuda.attention_plans import build_decode_plan
from tunesmith.engine.cuda.decode_work import DecodeWork, Division, Kind
from tunesmith.engine.cuda.graph_inputs import GraphContext, choose_capture_size
from tunesmith.engine.cuda.kernels.paged_decode import list_items
from tunesmith.model.forward.attention import run_body
from tunesmith.model.forward.graph_store import CapturedGraph, GraphStore


class HiddenGraphs:
    """Graphs by batch size, captured on first use."""

    def __init__(self, context: GraphContext) -> None:
        self._context = context
        num_slots, num_columns, device = context.num_slots, context.num_columns, context.model.device
        self._integers_2S = torch.zeros((2, num_slots), dtype=torch.long, device=device)
        """Token ids and positions."""
        self._block_table_SP = torch.zeros((num_slots, num_columns), dtype=torch.int32, device=device)
        self._host_integers_2S = torch.zeros((2, num_slots), dtype=torch.long, pin_memory=True)
        self._host_table_SP = torch.zeros((num_slots, num_columns), dtype=torch.int32, pin_memory=True)
        self._division_7S = torch.zeros((7, num_slots), dtype=torch.int32, device=device)
        self._host_division_7S = torch.zeros((7, num_slots), dtype=torch.int32, pin_memory=True)
        self._copied = torch.cuda.Event()
        """Recorded after the last copy from the host buffers."""
        self._graphs: GraphStore[Tensor] = GraphStore(context.model)
        """By batch size and how attention is divided; each writes hidden states [R, C]."""

    def compute(self, spans: Sequence[Span], token_ids: Sequence[int]) -> Tensor:
        """Queue a step; hidden states [R, C] of one token per request, valid until the next call is queued."""
        size = choose_capture_size(len(spans), self._context.num_slots)
        self._copied.synchronize()
        self._fill(spans, token_ids, size)
        positions_R, table_RP = self._host_integers_2S[1, : len(spans)], self._host_table_SP[: len(spans)]
        division = self._context.divider.divide(table_RP.numpy(), positions_R.numpy(), num_steps=1)
        graph = self._graphs.find((size, division.kind))
        if graph is None:
            graph = self._capture(size, division.kind)
            self._fill(spans, token_ids, size)
        self._copy(size, division)
        self._copied.record()
        return graph.replay()[: len(spans)]

    def _fill(self, spans: Sequence[Span], token_ids: Sequence[int], size: int) -> None:
        integers, table = self._host_integers_2S.numpy(), self._host_table_SP.numpy()
        integers[:, :size] = 0
        table[:size] = self._context.scratch_block
        integers[0, : len(spans)] = token_ids
        integers[1, : len(spans)] = [span.start for span in spans]
        for row, span in enumerate(spans):
            table[row, : len(span.blocks)] = span.blocks

    def _copy(self, size: int, division: Division) -> None:
        self._integers_2S.copy_(self._host_integers_2S, non_blocking=True)
        self._block_table_SP[:size].copy_(self._host_table_SP[:size], non_blocking=True)
        if division.kind is not Kind.WHOLE:
            division.fill(self._host_division_7S.numpy())
            self._division_7S.copy_(self._host_division_7S, non_blocking=True)

    def _capture(self, size: int, kind: Kind) -> CapturedGraph[Tensor]:
        """Capture a step on padding rows while the device is idle."""
        torch.cuda.synchronize()
        self._fill((), (), size)
        self._copy(size, self._context.divider.build_empty(kind))
        torch.cuda.synchronize()  # the next request's inputs go through the same host buffers
        ids_R, positions_R = self._integers_2S[:, :size]
        context = self._context
        work = DecodeWork.allocate(context.divider, kind, positions_R, self._division_7S)
        plan = build_decode_plan(context.cache, self._block_table_SP[:size], work)

        def run_step() -> Tensor:
            list_items(work)
            return run_body(context.model, ids_R[None], positions_R[None], plan)[0]

        with context.installed():
            return self._graphs.capture((size, kind), run_step)
