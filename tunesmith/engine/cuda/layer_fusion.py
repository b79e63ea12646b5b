"""The model's own layers, traced once for each kind of layer and run in fewer steps.

While `installed`, each decoder layer runs the graph that torch traced of its forward, rewritten by
`engine.cuda.fx_passes`; graphs that keep other arithmetic go to torch's compiler. All layers of one kind share one
graph, so that a model of 28 layers takes as long to prepare as one of two. Modules and parameters stay as they are.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.compile_fx import compile_fx
from transformers import PreTrainedModel

from tunesmith.engine.cuda.fx_passes import LayerFunctions, rewrite_layer
from tunesmith.errors import ModelError

LOGGER = logging.getLogger(__name__)
MAX_GRAPHS = 256
"""Of one traced function: kinds of layers, of plans and of models in one process."""
STEADY_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles depend on the position alone."""


class FusedLayers:
    """Another way to run a model's decoder layers."""

    def __init__(self, model: PreTrainedModel, functions: LayerFunctions, *, max_positions: int) -> None:
        """Positions are below `max_positions`."""
        decoder = model.get_decoder()
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            name = type(decoder).__name__
            raise ModelError(f"{name} has no list of layers named layers; set engine.cuda_decode=graphs")
        lower = partial(_lower, functions=functions)
        # Sizes are dynamic: one graph serves every batch. Only a layer that is traced whole can be rewritten.
        self._run: Callable[..., Any] = torch.compile(_run_layer, backend=lower, dynamic=True, fullgraph=True)
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = [
            (layer, partial(self._run_planned, layer, index)) for index, layer in enumerate(layers)
        ]
        norm, rotary = getattr(decoder, "norm", None), getattr(decoder, "rotary_emb", None)
        if isinstance(norm, nn.Module):
            self._forwards.append((norm, partial(self._run_traced, norm)))
        if isinstance(rotary, nn.Module) and _is_steady(rotary):
            self._forwards.append((rotary, RotaryTable(rotary, model, max_positions)))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the model's layers this way."""
        settings: dict[str, Any] = {
            "recompile_limit": MAX_GRAPHS,
            "accumulated_recompile_limit": MAX_GRAPHS,
            "specialize_float": True,
        }
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward
        try:
            with torch._dynamo.config.patch(settings):
                yield
        finally:
            for module, _ in self._forwards:
                module.__dict__.pop("forward", None)

    def _run_planned(self, layer: nn.Module, index: int, *arguments: Any, **options: Any) -> Any:
        options["attention_plan"] = options["attention_plan"].layers[index]
        return self._run_traced(layer, *arguments, **options)

    def _run_traced(self, layer: nn.Module, *arguments: Any, **options: Any) -> Any:
        """Run a layer; where torch cannot trace one, all run as they are from then on, which is only slower."""
        try:
            return self._run(layer, *arguments, **options)
        except TorchDynamoException as error:
            first_line = (str(error).splitlines() or [""])[0]
            LOGGER.warning("%s is run as it is, for torch cannot trace it: %s", type(layer).__name__, first_line)
            self._run = _run_layer
            return self._run(layer, *arguments, **options)


def _run_layer(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *arguments, **options)


def _lower(module: fx.GraphModule, inputs: Sequence[Any], *, functions: LayerFunctions) -> Callable[..., Any]:
    """Turn a traced layer into something that runs; a copy is rewritten, for it may turn out not to be enough."""
    rewritten = fx.GraphModule(module, fx.Graph())
    rewritten.graph = _copy_graph(module.graph)
    if rewrite_layer(rewritten, functions):
        return rewritten.forward
    return cast(Callable[..., Any], compile_fx(module, list(inputs)))


def _copy_graph(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


def _is_steady(rotary: nn.Module) -> bool:
    kind = getattr(rotary, "rope_type", None)
    parameters = list(inspect.signature(type(rotary).forward).parameters)
    return isinstance(kind, str) and kind in STEADY_ROTARY and parameters == ["self", "x", "position_ids"]


class RotaryTable:
    """Cosines and sines of every position, computed once by the model's own module."""

    @torch.no_grad()
    def __init__(self, rotary: nn.Module, model: PreTrainedModel, max_positions: int) -> None:
        positions_1T = torch.arange(max_positions, device=model.device)[None]
        sample = torch.empty((), dtype=model.dtype, device=model.device)
        self._tables: tuple[Tensor, Tensor] = rotary(sample, positions_1T)

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos_1TD, sin_1TD = self._tables
        return cos_1TD[:, position_ids[0]], sin_1TD[:, position_ids[0]]
