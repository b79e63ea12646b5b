"""Compiled decoder layers: elementwise operations between matrix products and attention are fused.

`torch.compile` compiles the forward of each layer class once, for any number of tokens; all layers of the class share
it, and torch's cache on disk serves the next run. Only code within `compiled_layers` runs compiled: the sampler uses
the original layers.

With `model.numerics=exact` a layer runs in the sampler's fused operations instead, each of which has a gradient of its
own (`model/kernels/layer_gradients.py`); torch differentiates what is not fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as fx_config
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tunesmith.model.forward.recurrence import list_recurrent
from tunesmith.model.torch_modes import is_exact, replaced
from tunesmith.trainer.sharding.sharded_model import find_sharding
from tunesmith.trainer.tree_attention.plan import exact_attention

CHECKPOINTS_FORWARD = "__call__" not in vars(GradientCheckpointingLayer)
"""Whether transformers checkpoints a layer in its forward, which is compiled here, and not around it (before 5.24)."""
MAX_VARIANTS = 64
"""Recompilations of one function: layer classes, with and without gradients, with and without adapters, dtypes."""


def can_compile(model: PreTrainedModel) -> bool:
    """On a GPU with unquantized weights that are not sharded.

    torch.compile does not support the kernels of quantized layers, and treats the shapes of sharded weights as dynamic.
    """
    is_plain = not getattr(model, "is_quantized", False) and find_sharding(model) is None
    return model.device.type == "cuda" and is_plain


@contextmanager
def compiled_layers(*models: PreTrainedModel) -> Iterator[None]:
    """Run the decoder layers and the final norms of the models compiled within this context."""
    modules: list[nn.Module] = []
    for model in models:
        modules += [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if isinstance(norm := getattr(model.get_decoder(), "norm", None), nn.Module):
            modules.append(norm)
    if not modules:
        yield
        return
    with (
        replaced([(vars(module), "forward", _compile_forward(module)) for module in modules]),
        torch._dynamo.config.patch(recompile_limit=MAX_VARIANTS, specialize_float=True),
        fx_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
    ):
        yield


def _compile_forward(module: Any) -> Callable[..., Any]:
    """The compiled forward of the module, which is called with the parameters' gradients set to None.

    torch.compile has a graph break at a parameter whose gradient has another dtype. A layer that is recompiled in the
    middle of an update, for rows of another size, would be compiled in pieces, which all later rows would use.
    """
    compiled = (fuse_function if is_exact() else compile_function)(type(module).forward)
    parameters = [parameter for parameter in module.parameters() if parameter.grad_dtype not in (None, parameter.dtype)]
    has_states = bool(list_recurrent(module))

    def run(*arguments: Any, **options: Any) -> Any:
        if has_states and (plan := options.get("attention_plan")) is not None:
            _ = plan.segments  # built now, since torch would trace how
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            return compiled(module, *arguments, **options)
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

    def run_inside(*arguments: Any, **options: Any) -> Any:
        module.gradient_checkpointing = False
        try:
            return run(*arguments, **options)
        finally:
            module.gradient_checkpointing = True

    def forward(*arguments: Any, **options: Any) -> Any:
        is_checkpointed = CHECKPOINTS_FORWARD and getattr(module, "gradient_checkpointing", False) and module.training
        if not is_checkpointed or not torch.is_grad_enabled():
            return run(*arguments, **options)
        return module._gradient_checkpointing_func(partial(run_inside, **options), *arguments)

    return forward


@lru_cache
def fuse_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run the forward in the operations of the sampler's fused layers, with gradients."""
    from tunesmith.model.forward.fx_passes import FusedOps, compile_layer
    from tunesmith.model.kernels import layer_gradients as layer_ops  # needs Triton, which is on CUDA machines only
    from tunesmith.trainer.tree_attention.kernels.exact_attention import attend_exactly

    ops = FusedOps(
        rms_norm=layer_ops.rms_norm,
        merged_linear=layer_ops.merged_linear,
        silu_and_mul=layer_ops.silu_and_mul,
        add_linear=layer_ops.add_linear,
        attention={exact_attention: attend_exactly},
    )
    return torch.compile(function, backend=partial(compile_layer, ops=ops), dynamic=True, fullgraph=True)


@lru_cache
def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with dynamic shapes; cached, so that each function is compiled once."""
    return torch.compile(function, dynamic=True)
