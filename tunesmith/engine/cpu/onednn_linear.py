"""Linear layers in the weight layout that oneDNN multiplies fastest on a CPU: 1.2 to 2.5 times `F.linear` at 4-64 rows.

The packed weights are a second copy, repacked whenever the weights may have changed. While an adapter is trained, the
frozen weights are packed once and the adapter's factors use `F.linear`. Packed weights are used only inside
`installed()`, that is in the engine's forward: the trainer and direct calls of the model use the parameters. One or two
rows of a small layer use the parameters too, which is faster. Results differ from `F.linear` by float rounding. Inputs
are split into pieces of a few fixed sizes, because oneDNN caches about half a MiB of kernels for every number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

MIN_WEIGHTS = 1 << 16
"""Smaller layers lose more to call overhead than they gain."""
TYPICAL_ROWS = 32
"""Number of rows that the layout is optimized for."""
PIECE_ROWS = (512, 256, 128, 64)
"""Rows multiplied at once, largest first; a remainder below the last size is one piece."""
MIN_PRODUCTS = 350_000
"""Multiplications in one call below which `F.linear` is faster: one or two rows of a small layer."""

Forward = Callable[[Tensor], Tensor]


class OneDnnLinears:
    """Packed copies of a model's larger linear layers; layers that would not gain are left as they are."""

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if _can_pack(module)]
        self._is_frozen = any(not layer.weight.requires_grad for layer in layers)
        """An adapter is trained: weights without gradients never change, and those with gradients are small."""
        self._layers = [layer for layer in layers if not (self._is_frozen and layer.weight.requires_grad)]
        self._forwards: list[Forward] = []
        self._short: list[Forward] = []
        self._unpacked: list[Forward] = []
        self._chosen: dict[int | None, list[tuple[dict[str, Any], Forward]]] = {}
        """The attributes of each layer and its forward, by number of rows."""

    def refresh(self) -> None:
        """Pack the current weights; tied weights are packed once, frozen weights in the first call only."""
        if self._is_frozen and self._forwards:
            return
        self._forwards.clear()
        self._short.clear()
        self._chosen.clear()
        self._unpacked = [partial(functional.linear, weight=layer.weight, bias=layer.bias) for layer in self._layers]
        packed_of: dict[int, Tensor] = {}
        with torch.no_grad():
            for layer in self._layers:
                pointer = layer.weight.data_ptr()
                if pointer not in packed_of:
                    packed_of[pointer] = torch.ops.mkldnn._reorder_linear_weight(layer.weight, TYPICAL_ROWS)
                self._forwards.append(partial(_multiply, packed_of[pointer], layer))
                self._short.append(partial(_multiply_piece, packed_of[pointer], layer.bias))

    @contextmanager
    def installed(self, *, num_rows: int | None = None) -> Iterator[None]:
        """Run the model's linear layers with the packed weights, on `num_rows` rows at most (None: any number).

        With a known number of rows, layers need not choose in every call how to multiply.
        """
        num_rows = limit_num_rows(num_rows)
        if num_rows not in self._chosen:
            self._chosen[num_rows] = self._choose(num_rows)
        chosen = self._chosen[num_rows]
        for attributes, forward in chosen:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, _ in chosen:
                attributes.pop("forward", None)

    def _choose(self, num_rows: int | None) -> list[tuple[dict[str, Any], Forward]]:
        packed = self._forwards if num_rows is None else self._short
        chosen = []
        for layer, forward, unpacked in zip(self._layers, packed, self._unpacked, strict=True):
            is_small = num_rows is not None and num_rows * layer.weight.numel() < MIN_PRODUCTS
            chosen.append((vars(layer), unpacked if is_small else forward))
        return chosen


def limit_num_rows(num_rows: int | None) -> int | None:
    """The number of rows, or None where it is so large that it does not matter."""
    return None if num_rows is None or num_rows > PIECE_ROWS[-1] else num_rows


def _can_pack(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or not torch.backends.mkldnn.is_available():
        return False
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= MIN_WEIGHTS


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
