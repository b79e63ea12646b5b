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

from tunesmith.engine.cpu.onednn_linear import limit_num_rows

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Parents that do not call their children by attribute."""


class DirectCall:
    """Calls a forward; has the attributes of the layer."""

    __slots__ = ("forward", "layer")

    def __init__(self, layer: nn.Module, forward: Callable[..., Tensor]) -> None:
        self.layer = layer
        self.forward = forward

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
        self._forwards: list[tuple[dict[str, Any], str, nn.Module, Callable[..., Tensor]]] = []
        self._calls: dict[int | None, list[tuple[dict[str, Any], str, DirectCall]]] = {}
        """By number of rows."""

    def refresh(self) -> None:
        """Weights may have been replaced, and hooks added or removed."""
        self._calls.clear()
        self._forwards = [
            (attributes, name, child, _build_forward(child))
            for attributes, name, child in self._places
            if not (child._forward_hooks or child._forward_pre_hooks)
        ]

    @contextmanager
    def installed(self, *, num_rows: int | None = None) -> Iterator[None]:
        """Call the layers directly, with the forwards installed now; these depend on the number of rows only."""
        num_rows = limit_num_rows(num_rows)
        if num_rows not in self._calls:
            self._calls[num_rows] = [
                (attributes, name, DirectCall(layer, vars(layer).get("forward", forward)))
                for attributes, name, layer, forward in self._forwards
            ]
        calls = self._calls[num_rows]
        for attributes, name, call in calls:
            attributes[name] = call
        try:
            yield
        finally:
            for attributes, name, _ in calls:
                attributes.pop(name, None)


def _is_leaf(module: nn.Module) -> bool:
    if type(module) is not nn.Linear and not type(module).__name__.endswith("RMSNorm"):
        return False
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def _build_forward(layer: nn.Module) -> Callable[..., Tensor]:
    if type(layer) is nn.Linear:
        return partial(functional.linear, weight=layer.weight, bias=layer.bias)
    return layer.forward
