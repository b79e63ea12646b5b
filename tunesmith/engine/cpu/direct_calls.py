"""Calls of the submodules of decoder layers without `nn.Module.__call__`, which takes about 3 us.

Inside `installed()` the attribute of the parent module, such as `self.q_proj`, is a `DirectCall` of the submodule's
forward or of the one that replaces it (`OneDnnLinears`, `RmsNorms`). Submodules with hooks are called as usual. Modules
that hold a submodule in another way, and everything outside `installed()`, use the submodule itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from tunesmith.engine.cpu.onednn_linear import limit_num_rows

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Parents that do not call their children by attribute."""
CALLED_TYPES = ("RMSNorm", "Attention", "MLP")
"""Ends of the names of classes, beside `nn.Linear`, that modeling code only calls."""


class DirectCall:
    """Calls a forward; has the attributes of its module."""

    __slots__ = ("forward", "module")

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


class DirectCalls:
    """The submodules on a CPU that a model's layers call."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (vars(parent), name, child)
            for parent in model.modules()
            if not isinstance(parent, (PreTrainedModel, *CONTAINERS))
            for name, child in parent.named_children()
            if _can_call_directly(child)
        ]
        self._forwards: list[tuple[dict[str, Any], str, nn.Module, Callable[..., Any]]] = []
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
        """Call the submodules directly, with the forwards installed now; these depend on the number of rows only."""
        num_rows = limit_num_rows(num_rows)
        if num_rows not in self._calls:
            self._calls[num_rows] = [
                (attributes, name, DirectCall(module, vars(module).get("forward", forward)))
                for attributes, name, module, forward in self._forwards
            ]
        calls = self._calls[num_rows]
        for attributes, name, call in calls:
            attributes[name] = call
        try:
            yield
        finally:
            for attributes, name, _ in calls:
                attributes.pop(name, None)


def _can_call_directly(module: nn.Module) -> bool:
    kind = type(module)
    if kind is not nn.Linear and not (kind.__name__.endswith(CALLED_TYPES) and kind.__call__ is nn.Module.__call__):
        return False
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def _build_forward(module: nn.Module) -> Callable[..., Any]:
    if type(module) is nn.Linear:
        return partial(functional.linear, weight=module.weight, bias=module.bias)
    return module.forward
