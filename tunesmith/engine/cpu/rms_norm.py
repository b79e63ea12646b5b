"""RMS norms in one call of PyTorch on a CPU, in place of the six of the modelling code.

Used only inside `installed()`, in the engine's forward: the trainer and direct calls of the model are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional


class RmsNorms:
    """The float32 norms of a model on a CPU that compute what `F.rms_norm` does."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if _is_rms_norm(module)]
        self._forwards: list[Callable[[Tensor], Tensor]] = []

    def refresh(self) -> None:
        """The weights may have been replaced."""
        self._forwards = [_build_forward(layer) for layer in self._layers]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the model's norms with `F.rms_norm`."""
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)


def _build_forward(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    weight, epsilon = layer.weight, layer.variance_epsilon
    assert isinstance(weight, Tensor)
    assert isinstance(epsilon, float)
    return partial(functional.rms_norm, normalized_shape=tuple(weight.shape), weight=weight, eps=epsilon)


@torch.no_grad()
def _is_rms_norm(module: nn.Module) -> bool:
    """Whether the module has the attributes of Llama's norm and agrees with `F.rms_norm` on a random input."""
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(
        getattr(module, "variance_epsilon", None), float
    ):
        return False
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    inputs = torch.randn(2, *weight.shape, generator=torch.Generator().manual_seed(0))
    return torch.allclose(module(inputs), _build_forward(module)(inputs), atol=1e-6, rtol=1e-6)
