"""Forward, loss and backward of a row as a CUDA graph, which the host launches with one call.

Rows are padded to few sizes (`batch.build_row`). The second row of a size is captured, with its tensors as static
inputs; later rows of the size are copied into these and replayed. Gradients accumulate in the same memory in every
update and parameters are read in place, so a graph is valid until a parameter moves. The first row of a size, and rows
that cannot be captured, are launched kernel by kernel; the gradient is the same.
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

from tunesmith.config import TrainerSection
from tunesmith.errors import ConfigError, TrainingError
from tunesmith.experience.samples import Trie
from tunesmith.model.forward.attention import depends_on_length
from tunesmith.model.forward.distribution import has_truncation
from tunesmith.model.forward.graph_store import CapturedGraph, GraphStore
from tunesmith.model.forward.recurrence import is_recurrent
from tunesmith.model.torch_modes import is_exact
from tunesmith.trainer.batch import DeviceInputs, PackedRow, TokenDistributions
from tunesmith.trainer.metrics import PartTotals
from tunesmith.trainer.sharding.sharded_model import find_sharding

LOGGER = logging.getLogger(__name__)
RunRow = Callable[[PackedRow, DeviceInputs, Tensor], PartTotals]
"""Accumulates the gradient of a row; the last argument is the KL coefficient."""
MAX_GRAPHS = 48
"""Maximum number of captured sizes; rows of further sizes are launched kernel by kernel."""
MAX_ROW_TOKENS = 16_384
"""Longer rows keep the device busy while kernels are launched, and their activations would stay allocated."""
LAUNCH_BOUND_PARAMETERS = 400_000_000
"""Number of parameters below which launching the kernels takes longer than running them."""
EXACT_LAUNCH_BOUND_PARAMETERS = 4_000_000_000
"""The same with exact numerics, whose layers are not compiled."""
METADATA_KEY = "tunesmith"
"""Key in the metadata of an autograd node."""


def can_capture(model: PreTrainedModel) -> bool:
    """Whether the model launches the same kernels for all rows of a size."""
    config = model.config.get_text_config()
    rotation = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [part.get("rope_type") for part in (rotation, *rotation.values()) if isinstance(part, dict)]
    return (
        model.device.type == "cuda"
        and not is_recurrent(config)
        and find_sharding(model) is None
        and torch.finfo(model.dtype).bits == 16
        and not getattr(model, "is_quantized", False)
        and not any(map(depends_on_length, kinds))
    )


def is_launch_bound(model: PreTrainedModel) -> bool:
    """Whether kernel launches on the host limit the training of the model."""
    most = EXACT_LAUNCH_BOUND_PARAMETERS if is_exact() else LAUNCH_BOUND_PARAMETERS
    return sum(parameter.numel() for parameter in model.parameters()) < most


def uses_row_graphs(model: PreTrainedModel, settings: TrainerSection, *, is_compiled: bool, has_dropout: bool) -> bool:
    """Whether rows run as CUDA graphs; ConfigError if that was requested but is not possible."""
    can = is_compiled and can_capture(model) and not settings.has_gradient_checkpointing and not has_dropout
    requested = settings.has_row_graphs
    if requested and not can:
        raise ConfigError(
            "trainer.has_row_graphs needs a GPU, trainer.has_compiled_layers, unquantized 16-bit weights that are "
            "whole on each rank, rotary embeddings that do not depend on length, and neither recurrent layers, "
            "gradient checkpointing nor model.lora.dropout: leave it out"
        )
    return can and (is_launch_bound(model) if requested is None else requested)


def can_replay(trie: Trie, distributions: TokenDistributions) -> bool:
    """Whether the row can be captured: not too long, no truncated sampling, logit bias, penalties or bans."""
    is_plain = not any(has_truncation(one) or one.logit_bias or one.depends_on_context for one in distributions.unique)
    return is_plain and trie.num_tokens <= MAX_ROW_TOKENS


def has_live_autograd_graph(model: PreTrainedModel) -> bool:
    """Whether an autograd graph that contains a parameter of the model is still referenced.

    The AccumulateGrad node of a parameter lives as long as a graph that contains it. Metadata written to a node that
    nothing else references is lost when the node is created again.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            _get_accumulate_grad_node(parameter).metadata[METADATA_KEY] = True
            if _get_accumulate_grad_node(parameter).metadata.pop(METADATA_KEY, False):
                return True
    return False


@torch.enable_grad()
def _get_accumulate_grad_node(parameter: nn.Parameter) -> Any:
    result = parameter.expand_as(parameter)
    assert result.grad_fn is not None
    return result.grad_fn.next_functions[0][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CapturedRow:
    """The static inputs and outputs of a graph."""

    row: PackedRow
    device_inputs: DeviceInputs
    kl_coef: Tensor
    totals: PartTotals

    def fill(self, row: PackedRow, device_inputs: DeviceInputs, kl_coef: Tensor) -> None:
        """Copy the inputs of another row of this size."""
        self.row.int_buffer.copy_(row.int_buffer)
        self.device_inputs.values_FE.copy_(device_inputs.values_FE)
        self.kl_coef.copy_(kl_coef)
        self.row.plan.copy_tables(row.plan)


class RowGraphs:
    """The CUDA graphs of one model under one algorithm."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._graphs: GraphStore[_CapturedRow] = GraphStore(model)
        self._seen: set[Hashable] = set()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._may_capture = True

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def begin_update(self) -> None:
        """Set the gradients, which must be None, to the zeroed memory in which the graphs accumulate."""
        parameters = list(self._model.parameters())
        assert all(parameter.grad is None for parameter in parameters), "gradients were not cleared after an update"
        if self._graphs.has_moved():
            self._graphs.clear()
            self._seen, self._gradients = set(), {}
        if self._gradients:
            torch._foreach_zero_(list(self._gradients.values()))
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient

    def end_update(self) -> None:
        """Keep the gradients of the first update as the static memory of all later ones."""
        if not self._gradients:
            self._gradients = {p: p.grad for p in self._model.parameters() if p.grad is not None}

    def run(self, row: PackedRow, device_inputs: DeviceInputs, kl_coef: Tensor, run_row: RunRow) -> PartTotals:
        """As `run_row`: replay a graph, capture one for the second row of a size, or launch kernel by kernel."""
        key = self._build_key(row, device_inputs)
        graph = self._graphs.find(key)
        if graph is None:
            is_due = key in self._seen and bool(self._gradients) and len(self._graphs) < MAX_GRAPHS
            if not is_due or not self._can_capture_now():
                self._seen.add(key)
                return run_row(row, device_inputs, kl_coef)
            graph = self._capture(key, row, device_inputs, kl_coef, run_row)
        graph.output.fill(row, device_inputs, kl_coef)
        totals = graph.replay().totals
        return replace(totals, values_PK=totals.values_PK.clone())  # the next replay overwrites them

    def _can_capture_now(self) -> bool:
        """Whether no autograd graph is tied to the stream of earlier rows; if one persists, capturing stays off."""
        if self._may_capture and has_live_autograd_graph(self._model):
            gc.collect()
            self._may_capture = not has_live_autograd_graph(self._model)
            if not self._may_capture:
                LOGGER.warning(
                    "rows are not captured as CUDA graphs: an output of the model with a pending backward is still "
                    "referenced"
                )
        return self._may_capture

    def _build_key(self, row: PackedRow, device_inputs: DeviceInputs) -> Hashable:
        """The key of rows that share a graph."""
        chunks = tuple((chunk.distribution, len(chunk.target_S), len(chunk.site_E)) for chunk in row.chunks)
        return row.input_ids_1T.shape, row.plan.sizes, chunks, device_inputs.names

    def _capture(
        self, key: Hashable, row: PackedRow, device_inputs: DeviceInputs, kl_coef: Tensor, run_row: RunRow
    ) -> CapturedGraph[_CapturedRow]:
        """Capture the row, whose tensors become static inputs; nothing is computed."""
        row.plan.reserve_tables()
        coef = kl_coef.clone()

        def run() -> _CapturedRow:
            totals = run_row(row, device_inputs, coef)
            return _CapturedRow(row=row, device_inputs=device_inputs, kl_coef=coef, totals=totals)

        try:
            return self._graphs.capture(key, run, num_warmups=0)  # the first row of this size has warmed up
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise TrainingError(
                f"a row could not be captured as a CUDA graph ({(str(error).splitlines() or [''])[0]}): set "
                "trainer.has_row_graphs=false and resume the run from its last checkpoint"
            ) from error
