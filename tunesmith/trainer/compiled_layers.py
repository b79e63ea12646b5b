"""Compiled decoder layers: what lies between matrix products and attention runs as few fused kernels.

One function for each kind of layer is compiled, for any number of tokens, and serves all layers of that kind; torch
keeps it on disk for the next run. Layers are as they were outside of `compiled_layers`: the sampler has its own ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

MAX_VARIANTS = 64
"""Of one function: kinds of layers, with gradients and without, with adapters and without, types of models."""


def can_compile(model: PreTrainedModel) -> bool:
    """On a GPU, unless weights are quantised: the kernels that read those are not torch's."""
    return model.device.type == "cuda" and not getattr(model, "is_quantized", False)


@contextmanager
def compiled_layers(*models: PreTrainedModel) -> Iterator[None]:
    """Within, the decoders' layers and last norms run compiled."""
    modules: list[nn.Module] = []
    for model in models:
        modules += [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if isinstance(norm := getattr(model.get_decoder(), "norm", None), nn.Module):
            modules.append(norm)
    if not modules:
        yield
        return
    for module in modules:
        module.forward = _compile_forward(module)
    try:
        with (
            torch._dynamo.config.patch(recompile_limit=MAX_VARIANTS, specialize_float=True),
            fx_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            yield
    finally:
        for module in modules:
            del module.forward


def _compile_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's forward, compiled; it is traced as if no gradient were there yet.

    torch does not trace a parameter whose gradient has another type: a layer compiled anew in the middle of an update,
    for rows of another size, would come in pieces, and those would serve every row from then on.
    """
    compiled = compile_function(type(module).forward)
    parameters = [parameter for parameter in module.parameters() if parameter.grad_dtype not in (None, parameter.dtype)]

    def forward(*arguments: Any, **options: Any) -> Any:
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            return compiled(module, *arguments, **options)
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    return forward


@lru_cache
def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for any number of tokens; always the same one, so that it is compiled once."""
    return torch.compile(function, dynamic=True)
