"""Merged weights: linear layers with the same input share one weight tensor, so that one matrix product computes them.

The model keeps its own `nn.Parameter` objects; each becomes a view of the merged tensor. The trainer updates them in
place, and the merged product reads the update. No weight is stored twice. Gradients that are accumulated in float32 are
merged like the weights.

Axes: N positions, C inputs, V outputs of all layers together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from tunesmith.model.custom_op import define_op

MERGED_LAYERS = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba"),
)  # fmt: skip
"""Names of sibling layers that receive the same input."""


def merge_weights(model: nn.Module) -> None:
    """Merge the weights, and biases, of the layers in `MERGED_LAYERS` that are not merged yet."""
    for layers in _find_siblings(model):
        for attribute in ("weight", "bias"):
            _merge([getattr(layer, attribute) for layer in layers])


def find_merged_tensors(model: nn.Module) -> list[list[Tensor]]:
    """The weights of all plain linear layers; those that are merged are in one list, in the merged tensor's order."""
    rest = {id(layer.weight): layer.weight for layer in model.modules() if type(layer) is nn.Linear}
    merged = []
    for layers in _find_siblings(model):
        weights: list[Tensor] = [layer.weight for layer in layers]
        if get_merged_view(weights) is not None:
            merged.append(weights)
            for weight in weights:
                rest.pop(id(weight))
    return [*merged, *([weight] for weight in rest.values())]


def _find_siblings(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Linear layers with the same input, of PEFT layers the base layers; the first factors of their adapters; and the
    second factors, which are applied together (`FusedOps.add_adapters`)."""
    for module in model.modules():
        for names in MERGED_LAYERS:
            layers = [getattr(module, name, None) for name in names]
            downs, ups = (
                [next(iter(getattr(layer, factor, {}).values()), None) for layer in layers]
                for factor in ("lora_A", "lora_B")
            )
            for each in ([getattr(layer, "base_layer", layer) for layer in layers], downs, ups):
                if all(type(layer) is nn.Linear for layer in each):
                    yield cast(list[nn.Linear], each)


def _merge(parameters: Sequence[Tensor | None]) -> None:
    tensors = [parameter.data for parameter in parameters if parameter is not None]
    if len(tensors) < len(parameters) or get_merged_view(tensors) is not None:
        return
    if len({(tensor.dtype, tensor.device, tensor.shape[1:]) for tensor in tensors}) > 1:
        return
    merged = torch.cat(tensors)
    for parameter, part in zip(parameters, merged.split([len(tensor) for tensor in tensors]), strict=True):
        assert parameter is not None
        # a view: the optimizer's updates in place are those of the merged tensor, and nothing is stored twice
        parameter.data = part


def get_merged_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """View of the tensors concatenated along the first axis; None unless they are adjacent in this order."""
    first = tensors[0]
    offset, layout = first.storage_offset(), (first.shape[1:], first.stride(), first.untyped_storage().data_ptr())
    for tensor in tensors:
        found = (tensor.shape[1:], tensor.stride(), tensor.untyped_storage().data_ptr())
        if tensor.storage_offset() != offset or found != layout:
            return None
        offset += len(tensor) * tensor.stride(0)
    return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride(), first.storage_offset())


@dataclass(slots=True)
class MergedGroup:
    """Linear layers that are computed as one."""

    indices: list[int]
    """The layers, in the order of their rows in the merged tensor."""
    weight: Tensor
    bias: Tensor | None


def find_merged_groups(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[MergedGroup]:
    """Layers grouped by merged weights and biases; members need not be consecutive in the arguments."""
    groups: list[MergedGroup] = []
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        for group in groups:
            merged, merged_bias = get_merged_view((group.weight, weight)), None
            if merged is None or (group.bias is None) != (bias is None):
                continue
            if group.bias is not None and bias is not None:
                merged_bias = get_merged_view((group.bias, bias))
                if merged_bias is None:
                    continue
            group.indices.append(index)
            group.weight, group.bias = merged, merged_bias
            break
        else:
            groups.append(MergedGroup([index], weight, bias))
    return groups


def concat_linear(inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The products with the weights, side by side: one product if they are merged."""
    merged = get_merged_view(weights)
    if merged is not None:
        return functional.linear(inputs, merged)
    return torch.cat([functional.linear(inputs, weight) for weight in weights], dim=-1)


def _build_product(inputs: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], sum(weight.shape[0] for weight in weights)))


concat_linear_op = define_op(
    "concat_linear(Tensor inputs, Tensor[] weights) -> Tensor", run=concat_linear, build=_build_product
)
"""`concat_linear` as one operation for torch's compiler, which cannot see whether weights are merged. It has one
output, since outputs of an operation may not share memory."""


def accumulate_weight_grads(weights: Sequence[Tensor], grad_NV: Tensor, hidden_NC: Tensor) -> bool:
    """Add the gradient of one weight, or of merged ones, to their float32 `weight.grad`s in one product, so that it is
    not rounded to 16 bits; False if their gradients are of the weights' dtype, or are not merged as the weights are."""
    if not all(weight.is_leaf and weight.dtype != weight.grad_dtype == torch.float32 for weight in weights):
        return False
    present = [weight.grad for weight in weights if weight.grad is not None]
    if not present:
        whole = torch.mm(grad_NV.t(), hidden_NC, out_dtype=torch.float32)
        for weight, part in zip(weights, whole.split(list(map(len, weights))), strict=True):
            weight.grad = part
        return True
    total = get_merged_view(present) if len(present) == len(weights) else None
    if total is not None:
        torch.addmm(total, grad_NV.t(), hidden_NC, out_dtype=total.dtype, out=total)
    return total is not None
