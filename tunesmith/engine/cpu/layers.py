"""Faster forwards of layers on a CPU: linear layers in oneDNN's weight layout, norms in one call, direct calls.

They are used only inside `CpuLayers.installed()`, that is in the engine's forward: the trainer and direct calls of the
model use the parameters and the modeling code. Results differ from those by float rounding.

oneDNN multiplies its own weight layout 1.2 to 2.5 times as fast as `F.linear` at 4 to 64 rows. The packed weights are a
second copy, repacked whenever the weights may have changed. While an adapter is trained, the frozen weights are packed
once and the adapter's factors use `F.linear`. One or two rows of a small layer use the parameters too, because that is
faster. Inputs are split into pieces of a few fixed sizes, because oneDNN caches about half a MiB of kernels for each
number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from tunesmith.model.torch_modes import Attribute, replaced
from tunesmith.model.towers import list_towers

MIN_WEIGHTS = 1 << 16
"""Smaller layers lose more to call overhead than they gain."""
TYPICAL_ROWS = 32
"""Number of rows that the layout is optimized for."""
PIECE_ROWS = (512, 256, 128, 64)
"""Rows multiplied at once, largest first; a remainder below the last size is one piece."""
MIN_PRODUCTS = 350_000
"""Multiplications in one call below which `F.linear` is faster: one or two rows of a small layer."""

Forward = Callable[..., Any]


class CpuLayers:
    """All replacements of one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._linears, self._norms, self._places = OneDnnLinears(model), find_rms_norms(model), find_places(model)
        self._chosen: dict[int | None, list[Attribute]] = {}
        """What is replaced for a number of rows; None: any number."""
        self._is_stale = True

    def mark_weights_updated(self) -> None:
        """The parameters may have changed; they are read again at the next forward."""
        self._is_stale = True

    @contextmanager
    def installed(self, *, num_rows: int) -> Iterator[None]:
        """Run the model's layers faster, on `num_rows` rows at most."""
        if self._is_stale:
            self._linears.refresh()
            self._chosen.clear()
            self._is_stale = False
        limited = None if num_rows > PIECE_ROWS[-1] else num_rows
        if limited not in self._chosen:
            forwards = [*self._linears.list_forwards(limited), *list_norm_forwards(self._norms)]
            # direct calls take the forwards that are installed when they are listed
            with replaced(forwards):
                self._chosen[limited] = [*forwards, *list_direct_calls(self._places)]
        with replaced(self._chosen[limited]):
            yield


class OneDnnLinears:
    """Packed copies of a model's larger linear layers; layers that would not gain are left as they are."""

    def __init__(self, model: nn.Module) -> None:
        unused = {id(each) for name in list_towers(model) for each in model.get_submodule(name).modules()}
        layers = [module for module in model.modules() if id(module) not in unused and _can_pack(module)]
        self._is_frozen = any(not layer.weight.requires_grad for layer in layers)
        """An adapter is trained: weights without gradients never change, and those with gradients are small."""
        self._layers = [layer for layer in layers if not (self._is_frozen and layer.weight.requires_grad)]
        self._packed: list[Tensor] = []
        """The weight of each layer."""

    def refresh(self) -> None:
        """Pack the current weights; tied weights are packed once, frozen weights in the first call only."""
        if self._is_frozen and self._packed:
            return
        weight_of = {layer.weight.data_ptr(): layer.weight for layer in self._layers}
        with torch.no_grad():
            packed_of = {
                pointer: torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
                for pointer, weight in weight_of.items()
            }
        self._packed = [packed_of[layer.weight.data_ptr()] for layer in self._layers]

    def list_forwards(self, num_rows: int | None) -> list[Attribute]:
        """The layers' forwards with the packed weights, on `num_rows` rows at most (None: any number).

        With a known number of rows, layers need not choose in every call how to multiply.
        """
        return [
            (vars(layer), "forward", _choose_forward(layer, packed, num_rows))
            for layer, packed in zip(self._layers, self._packed, strict=True)
        ]


def _can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= MIN_WEIGHTS


def _choose_forward(layer: nn.Linear, packed: Tensor, num_rows: int | None) -> Forward:
    if num_rows is None:
        return partial(_multiply, packed, layer)
    if num_rows * layer.weight.numel() < MIN_PRODUCTS:
        return partial(functional.linear, weight=layer.weight, bias=layer.bias)
    return partial(_multiply_piece, packed, layer.bias)


def _multiply(packed: Tensor, layer: nn.Linear, inputs: Tensor) -> Tensor:
    if inputs.numel() * layer.out_features < MIN_PRODUCTS:
        return functional.linear(inputs, layer.weight, layer.bias)
    num_rows = inputs.numel() // inputs.shape[-1]
    if num_rows <= PIECE_ROWS[-1] or num_rows in PIECE_ROWS:
        return _multiply_piece(packed, layer.bias, inputs)
    pieces = inputs.reshape(num_rows, -1).split(_split_rows(num_rows))
    return torch.cat([_multiply_piece(packed, layer.bias, piece) for piece in pieces]).view(*inputs.shape[:-1], -1)


def _multiply_piece(packed: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(inputs, packed, bias, "none", [], "")


@lru_cache(maxsize=1024)
def _split_rows(num_rows: int) -> list[int]:
    """Sizes of the pieces of `num_rows` rows."""
    sizes = []
    for size in PIECE_ROWS:
        sizes += [size] * (num_rows // size)
        num_rows %= size
    return [*sizes, num_rows] if num_rows else sizes


def find_rms_norms(model: nn.Module) -> list[nn.Module]:
    """The float32 norms of a model on a CPU that compute what `F.rms_norm` does."""
    return [module for module in model.modules() if _is_rms_norm(module)]


def list_norm_forwards(norms: Sequence[nn.Module]) -> list[Attribute]:
    """`F.rms_norm` with the current weights, one call of PyTorch in place of the six of the modeling code."""
    return [(vars(norm), "forward", _build_norm(norm)) for norm in norms]


def _build_norm(layer: nn.Module) -> Callable[[Tensor], Tensor]:
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
    return torch.allclose(module(inputs), _build_norm(module)(inputs), atol=1e-6, rtol=1e-6)


CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Parents that do not call their children by attribute."""
CALLED_TYPES = ("RMSNorm", "Attention", "MLP")
"""Ends of the names of classes, beside `nn.Linear`, that modeling code only calls."""


class DirectCall:
    """Calls a forward; has the attributes of its module.

    In the place of a submodule of a decoder layer, such as `self.q_proj`, it saves `nn.Module.__call__` and the 3 us
    that it takes.
    """

    __slots__ = ("forward", "module")

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def find_places(model: nn.Module) -> list[Attribute]:
    """Submodules that can be called directly, where a parent module holds them by attribute."""
    return [
        (vars(parent), name, child)
        for parent in model.modules()
        if not isinstance(parent, (PreTrainedModel, *CONTAINERS))
        for name, child in parent.named_children()
        if _can_call_directly(child)
    ]


def list_direct_calls(places: Sequence[Attribute]) -> list[Attribute]:
    """Direct calls of the forwards that are installed now; submodules with hooks are called as usual."""
    return [
        (attributes, name, DirectCall(child, _find_forward(child)))
        for attributes, name, child in places
        if not (child._forward_hooks or child._forward_pre_hooks)
    ]


def _can_call_directly(module: nn.Module) -> bool:
    kind = type(module)
    if kind is not nn.Linear and not (kind.__name__.endswith(CALLED_TYPES) and kind.__call__ is nn.Module.__call__):
        return False
    return all(parameter.device.type == "cpu" for parameter in module.parameters())


def _find_forward(module: nn.Module) -> Forward:
    """The forward that is installed, or the module's own."""
    if type(module) is nn.Linear and "forward" not in vars(module):
        return partial(functional.linear, weight=module.weight, bias=module.bias)
    return module.forward
