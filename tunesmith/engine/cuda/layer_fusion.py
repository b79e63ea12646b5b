"""Layer fusion: the model's own decoder layers, traced by torch and run as fused graphs.

While `installed`, each decoder layer runs its traced forward after the passes of `model.forward.fx_passes`. All layers
of one kind share one graph, so a model of 28 layers takes as long to prepare as one of two. Modules and parameters do
not change.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental import _config as fx_config
from transformers import PreTrainedModel

from tunesmith.errors import ModelError
from tunesmith.model.forward.attention import FIXED
from tunesmith.model.forward.fx_passes import FusedOps, compile_layer
from tunesmith.model.torch_modes import Attribute, is_exact, replaced

LOGGER = logging.getLogger(__name__)
MAX_GRAPHS = 256
"""Traced graphs of one function: kinds of layers, of attention plans and of models in one process."""
STATIC_ROPE_TYPES = {"default", "linear", "llama3", "yarn", FIXED}
"""Rotary embeddings whose angles depend only on the position."""


class FusedLayers:
    """Runs a model's decoder layers, final norm and rotary embedding as fused graphs."""

    def __init__(self, model: PreTrainedModel, ops: FusedOps, *, max_positions: int) -> None:
        """`max_positions`: size of the table of rotary angles. With quantized operations every layer must fuse."""
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            name = type(decoder).__name__
            raise ModelError(f"{name} has no list of layers named layers; set engine.cuda_decode=graphs")
        backend = partial(compile_layer, ops=ops)
        self._is_quantized = ops.quantized is not None
        # Sizes are dynamic: one graph serves every batch size. Only a layer traced without graph breaks can be fused.
        self._run: Callable[..., Any] = torch.compile(_run_layer, backend=backend, dynamic=True, fullgraph=True)
        self._forwards: list[Attribute] = [
            (vars(layer), "forward", partial(self._run_planned, layer, index)) for index, layer in enumerate(layers)
        ]
        norm, rotary = getattr(decoder, "norm", None), getattr(decoder, "rotary_emb", None)
        if isinstance(norm, nn.Module):
            self._forwards.append((vars(norm), "forward", partial(self._run_traced, norm)))
        if isinstance(rotary, nn.Module) and _has_static_angles(rotary):
            self._forwards.append((vars(rotary), "forward", RotaryTable(rotary, model, max_positions)))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, the model's layers run fused."""
        settings: dict[str, Any] = {
            "recompile_limit": MAX_GRAPHS,
            "accumulated_recompile_limit": MAX_GRAPHS,
            "specialize_float": True,
        }
        with (
            replaced(self._forwards),
            torch._dynamo.config.patch(settings),
            # sizes that are equal by chance, such as two rows and two heads, are not one size in the graph
            fx_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            yield

    def _run_planned(self, layer: nn.Module, index: int, *arguments: Any, **options: Any) -> Any:
        # one plan object a layer: the traced function then has the layer's cache as an input instead of a constant, and
        # one graph serves all layers
        options["attention_plan"] = options["attention_plan"].layers[index]
        return self._run_traced(layer, *arguments, **options)

    def _run_traced(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Run a layer; if torch cannot trace one, all layers run unfused from then on: slower, but correct."""
        try:
            return self._run(layer, *arguments, **options)
        except TorchDynamoException as error:
            # the message of a backend's error begins with the names of all operations
            cause = getattr(error, "inner_exception", error)
            first_line = (str(cause).splitlines() or [""])[0]
            if self._is_quantized or is_exact():
                knob = "engine.weight_format=fp8" if self._is_quantized else "model.numerics=exact"
                raise ModelError(
                    f"{knob} is not supported for {type(layer).__name__}: {first_line}; leave it out"
                ) from error
            LOGGER.warning("%s runs unfused because torch cannot trace it: %s", type(layer).__name__, first_line)
            self._run = _run_layer
            return self._run(layer, *arguments, **options)


def _run_layer(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *arguments, **options)


def _has_static_angles(rotary: nn.Module) -> bool:
    kind = getattr(rotary, "rope_type", None)
    parameters = list(inspect.signature(type(rotary).forward).parameters)
    if hasattr(rotary, "mrope_section"):  # its positions have rows of time, height and width
        return False
    return isinstance(kind, str) and kind in STATIC_ROPE_TYPES and parameters == ["self", "x", "position_ids"]


class RotaryTable:
    """Cosines and sines of all positions, computed once by the model's own module."""

    @torch.no_grad()
    def __init__(self, rotary: nn.Module, model: PreTrainedModel, max_positions: int) -> None:
        positions_1T = torch.arange(max_positions, device=model.device)[None]
        sample = torch.empty((), dtype=model.dtype, device=model.device)
        self._tables: tuple[Tensor, Tensor] = rotary(sample, positions_1T)

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos_1TD, sin_1TD = self._tables
        return cos_1TD[:, position_ids[0]], sin_1TD[:, position_ids[0]]
