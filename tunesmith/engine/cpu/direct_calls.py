"""Calls of linear layers and norms without `nn.Module.__call__`, which costs about 3 us more than the forward.

Inside `installed()` the attribute of the parent module, such as `self.q_proj`, is a `DirectCall` of the layer's forward
or of the one that replaces it (`OneDnnLinears`, `RmsNorms`). Layers with hooks are called as usual. Modules that hold
the layer in another way, and everything outside `installed()`, use the layer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Parents that do not call their children by attribute."""


class DirectCall:
    """Calls a forward; has the attributes of the layer."""

    __slots__ = ("forward", "layer")

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.forward: Callable[..., Tensor] = layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class DirectCalls:
    """The linear layers and norms on a CPU that a model's layers call."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (vars(parent), name, child)
            for parent in model.modules()
            if not isinstance(parent, (PreTrainedModel, *CONTAINERS))
            for name, child in parent.named_children()
            if _is_leaf(child)
        ]
        self._calls: list[tuple[dict[str, Any], str, DirectCall, Callable[..., Tensor]]] = []

    def refresh(self) -> None:
        """Weights may have been replaced, and hooks added or removed."""
        self._calls = [
            (attributes, name, DirectCall(child), _build_forward(child))
            for attributes, name, child in self._places
            if not (child._forward_hooks or child._forward_pre_hooks)
        ]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Call the layers directly, with the forwards that are installed now."""
        for attributes, name, call, forward in self._calls:
            call.forward = vars(call.layer).get("forward", forward)
            attributes[name] = call
        try:
            yield
        finally:
            for attributes, name, *_ in self._calls:
                attributes.pop(name, None)


def _is_leaf(module: nn.Module) -> bool:
    if type(module) is not nn.Linear and not type(module).__name__.endswith("RMSNorm"):
        return False
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def _build_forward(layer: nn.Module) -> Callable[..., Tensor]:
    if type(layer) is nn.Linear:
        return partial(functional.linear, weight=layer.weight, bias=layer.bias)
    return layer.forward
