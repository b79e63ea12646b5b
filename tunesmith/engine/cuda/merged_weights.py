"""Weights that are multiplied by the same input, side by side in memory, so that one product serves them all.

The parameters stay the objects that they were, each a window of one larger tensor: the trainer updates them in place,
and the product over the whole sees it. Nothing is stored twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

NEIGHBOURS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that one module gives the same input."""


def lay_side_by_side(model: nn.Module) -> None:
    """Move the weights of neighbours next to each other, where they are not yet."""
    for module in model.modules():
        for names in NEIGHBOURS:
            layers = [_get_linear(module, name) for name in names]
            if all(layer is not None for layer in layers):
                for attribute in ("weight", "bias"):
                    _move([getattr(layer, attribute) for layer in layers])


def _get_linear(module: nn.Module, name: str) -> nn.Linear | None:
    """The layer of that name, or what an adapter has wrapped around it."""
    layer = getattr(module, name, None)
    layer = getattr(layer, "base_layer", layer)
    return layer if type(layer) is nn.Linear else None


def _move(parameters: Sequence[Tensor | None]) -> None:
    tensors = [parameter.data for parameter in parameters if parameter is not None]
    if len(tensors) < len(parameters) or join_neighbours(tensors) is not None:
        return
    if len({(tensor.dtype, tensor.device, tensor.shape[1:]) for tensor in tensors}) > 1:
        return
    whole = torch.cat(tensors)
    for parameter, part in zip(parameters, whole.split([len(tensor) for tensor in tensors]), strict=True):
        assert parameter is not None
        parameter.data = part


def join_neighbours(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor over all, joined along the first axis without a copy; None where they do not lie side by side."""
    first = tensors[0]
    place = first.storage_offset()
    for tensor in tensors:
        is_next = tensor.storage_offset() == place and tensor.is_contiguous() and tensor.shape[1:] == first.shape[1:]
        if not is_next or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        place += tensor.numel()
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride(), first.storage_offset())


def find_runs(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[list[int]]:
    """Indices of layers whose weights, and biases, follow each other in memory, whatever comes between them here."""
    runs: list[list[int]] = []
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        for run in runs:
            given = [biases[other] for other in run]
            is_next = join_neighbours([*(weights[other] for other in run), weight]) is not None
            if is_next and _do_biases_join([*given, bias]):
                run.append(index)
                break
        else:
            runs.append([index])
    return runs


def _do_biases_join(biases: Sequence[Tensor | None]) -> bool:
    """All have one, side by side, or none has any."""
    given = [bias for bias in biases if bias is not None]
    return not given or (len(given) == len(biases) and join_neighbours(given) is not None)
