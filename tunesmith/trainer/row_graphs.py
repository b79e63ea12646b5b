"""Forward, loss and backward of rows as CUDA graphs: the host launches a row at once, not kernel by kernel.

Rows come filled up to few sizes (`batch.build_row`). The second row of a size is recorded, into its own memory; later
ones are copied there and replayed. Gradients are added up in the same memory in every update, and parameters are read
where they lie, so a graph stays valid while they do not move. The first row of a size, and rows that no graph can
hold, run kernel by kernel; the gradient is the same.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.errors import TrainingError
from tunesmith.experience.trie import Trie
from tunesmith.model.forward.distribution import has_truncation
from tunesmith.trainer.batch import Kinds, Row, SentInputs
from tunesmith.trainer.metrics import PartTotals
from tunesmith.trainer.tree_attention.plan import find_long_paths

LOGGER = logging.getLogger(__name__)
RunRow = Callable[[Row, SentInputs, Tensor], PartTotals]
"""Adds a row's gradient to the parameters'; the last argument is the weight of the KL term."""
MAX_GRAPHS = 48
"""Sizes that are recorded; more run kernel by kernel."""
SMALL_MODEL = 400_000_000
"""Parameters below which launching kernels takes longer than running them."""
NOTE = "tunesmith"
"""What is noted in a node of autograd to know it again."""
CHANGING_ROTATIONS = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies the host chooses by the row's length."""


def can_record(model: PreTrainedModel) -> bool:
    """Whether rows of the model are the same kernels whatever they hold."""
    config = model.config.get_text_config()
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [part.get("rope_type") for part in (rotation, *rotation.values()) if isinstance(part, dict)]
    return (
        model.device.type == "cuda"
        and torch.finfo(model.dtype).bits == 16
        and not getattr(model, "is_quantized", False)
        and not any(kind in CHANGING_ROTATIONS for kind in kinds)
    )


def is_small(model: PreTrainedModel) -> bool:
    """Whether the host bounds the model's training where it launches kernel by kernel."""
    return sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL


def can_replay(trie: Trie, kinds: Kinds) -> bool:
    """Whether a graph can hold the row: attention by tables alone, and scores without a filter."""
    is_plain = not any(has_truncation(one) or one.logit_bias for one in kinds.distributions)
    return is_plain and find_long_paths(trie) is None


def has_live_graph(model: PreTrainedModel) -> bool:
    """Whether a result of a parameter is alive whose gradient has not been computed.

    autograd's node of a parameter lives as long as what was computed from it: what is noted in one that nobody else
    holds is gone when it is asked for again.
    """
    return any(_is_node_alive(parameter) for parameter in model.parameters() if parameter.requires_grad)


def _is_node_alive(parameter: nn.Parameter) -> bool:
    _find_node(parameter).metadata[NOTE] = True
    return _find_node(parameter).metadata.pop(NOTE, False)


@torch.enable_grad()
def _find_node(parameter: nn.Parameter) -> Any:
    result = parameter.expand_as(parameter)
    assert result.grad_fn is not None
    return result.grad_fn.next_functions[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    """A graph and the memory that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    row: Row
    sent: SentInputs
    kl_coef: Tensor
    totals: PartTotals

    def replay(self, row: Row, sent: SentInputs, kl_coef: Tensor) -> PartTotals:
        self.row.numbers.copy_(row.numbers)
        self.sent.values_FE.copy_(sent.values_FE)
        self.kl_coef.copy_(kl_coef)
        self.row.plan.copy_tables(row.plan)
        self.graph.replay()
        return replace(self.totals, values_PK=self.totals.values_PK.clone())


class RowGraphs:
    """The graphs of one model under one algorithm."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._recorded: dict[Hashable, _Recorded] = {}
        self._seen: set[Hashable] = set()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._places: list[int] = []
        self._memory = torch.cuda.graph_pool_handle()
        self._may_record = True

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def begin_update(self) -> None:
        """Put the gradients, which must have been cleared, where the graphs add to them."""
        parameters = list(self._model.parameters())
        assert all(parameter.grad is None for parameter in parameters), "gradients of an update that has not ended"
        places = [parameter.data_ptr() for parameter in parameters]
        if places != self._places:
            self._recorded, self._seen, self._gradients, self._places = {}, set(), {}, places
            self._memory = torch.cuda.graph_pool_handle()  # the pool went with its last graph
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient

    def end_update(self) -> None:
        """Keep the memory of the first update's gradients for all later ones."""
        if not self._gradients:
            self._gradients = {p: p.grad for p in self._model.parameters() if p.grad is not None}

    def run(self, row: Row, sent: SentInputs, kl_coef: Tensor, run_row: RunRow) -> PartTotals:
        """As `run_row`, by a graph where there is one or where it is time to record it."""
        key = self._describe(row, sent)
        if key not in self._recorded:
            is_due = key in self._seen and bool(self._gradients) and len(self._recorded) < MAX_GRAPHS
            if not is_due or not self._can_record_now():
                self._seen.add(key)
                return run_row(row, sent, kl_coef)
            self._recorded[key] = self._record(row, sent, kl_coef, run_row)
        return self._recorded[key].replay(row, sent, kl_coef)

    def _can_record_now(self) -> bool:
        """Whether no gradient is tied to the stream of rows that ran before; where one stays tied, never again."""
        if self._may_record and has_live_graph(self._model):
            gc.collect()
            self._may_record = not has_live_graph(self._model)
            if not self._may_record:
                LOGGER.warning(
                    "rows run kernel by kernel, not as CUDA graphs: somebody holds a result of the model whose "
                    "gradient has not been computed"
                )
        return self._may_record

    def _describe(self, row: Row, sent: SentInputs) -> Hashable:
        """What rows of one graph have in common."""
        chunks = tuple((chunk.distribution, len(chunk.target_S), len(chunk.site_E)) for chunk in row.chunks)
        return row.input_ids_1T.shape, chunks, sent.names

    def _record(self, row: Row, sent: SentInputs, kl_coef: Tensor, run_row: RunRow) -> _Recorded:
        """Record the row, whose memory later rows are copied to; nothing is computed."""
        row.plan.reserve_tables()
        coef, graph = kl_coef.clone(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                totals = run_row(row, sent, coef)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise TrainingError(
                f"a row could not be recorded as a CUDA graph ({(str(error).splitlines() or [''])[0]}): set "
                "trainer.has_row_graphs=false, and the run goes on from its last checkpoint"
            ) from error
        return _Recorded(graph=graph, row=row, sent=sent, kl_coef=coef, totals=totals)
