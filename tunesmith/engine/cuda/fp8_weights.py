"""Sampling from FP8 weights: an e4m3 copy of the decoder layers' linear weights, with one scale per output.

The copy is quantized from the model's own weights whenever these may have changed, into the same memory, so CUDA graphs
stay valid. Inputs are quantized per token. Embedding, head, norms, attention and KV cache keep the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.engine.cuda.kernels import fp8_kernels
from tunesmith.engine.cuda.kernels.fp8_kernels import QuantizedRows, quantize_rows
from tunesmith.engine.cuda.kernels.layer_ops import CUDA_OPS
from tunesmith.errors import ModelError
from tunesmith.model.forward.fx_passes import FusedOps, QuantizedOps
from tunesmith.model.merged_weights import find_merged_groups, find_merged_tensors, get_merged_view, merge_weights

SIZE_MULTIPLE = 16
"""Sizes of an FP8 product must be multiples of this."""


class Fp8Weights:
    """The FP8 copy of a model's merged weights, and the operations of fused layers that read it."""

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        """Merges the model's weights first."""
        merge_weights(model)
        self._model = model
        self._sources: list[Tensor] = []
        self._copies: list[QuantizedRows] = []
        self._place_of: dict[int, tuple[int, int]] = {}
        """Copy and its first row, by the address of a weight."""
        self._one = torch.ones((), device=model.device)
        self.rebuild()
        self.ops = FusedOps(
            rms_norm=CUDA_OPS.rms_norm,
            merged_linear=self._run_merged_linear,
            silu_and_mul=CUDA_OPS.silu_and_mul,
            add_linear=self._run_add_linear,
            attention=CUDA_OPS.attention,
            quantized=QuantizedOps(rms_norm=_run_rms_norm, swiglu=self._run_swiglu),
        )

    @torch.no_grad()
    def rebuild(self) -> None:
        """Allocate and quantize after the weights have moved in memory."""
        self._sources, self._copies, self._place_of = [], [], {}
        for weights in find_merged_tensors(self._model.get_decoder()):
            merged = get_merged_view(weights)
            assert merged is not None
            first = 0
            for weight in weights:
                if weight.shape[0] % SIZE_MULTIPLE or weight.shape[1] % SIZE_MULTIPLE:
                    raise ModelError(
                        f"engine.weight_format=fp8 needs linear layers whose sizes are multiples of {SIZE_MULTIPLE}; "
                        f"{type(self._model).__name__} has one of {weight.shape[1]} inputs and {len(weight)} outputs"
                    )
                self._place_of[weight.data_ptr()] = (len(self._copies), first)
                first += len(weight)
            self._sources.append(merged)
            self._copies.append(quantize_rows(merged))

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the current weights into the same memory."""
        for source, copy in zip(self._sources, self._copies, strict=True):
            quantize_rows(source, out=copy)

    def get(self, weight: Tensor) -> QuantizedRows:
        """The FP8 rows of a weight, or of several as one view."""
        place = self._place_of.get(weight.data_ptr())
        if place is None:
            raise ModelError(
                "engine.weight_format=fp8: a decoder layer multiplies by a tensor that is no linear weight"
            )
        copy, first = self._copies[place[0]], place[1]
        part = slice(first, first + len(weight))
        return QuantizedRows(values_RK=copy.values_RK[part], scales_R=copy.scales_R[part])

    def _multiply(self, rows: QuantizedRows, weight: QuantizedRows) -> Tensor:
        """The unscaled product, in bfloat16, whose exponent holds every sum of products of e4m3 numbers."""
        return torch._scaled_mm(
            rows.values_RK, weight.values_RK.t(), scale_a=self._one, scale_b=self._one, out_dtype=torch.bfloat16
        )

    def _run_merged_linear(
        self, inputs: Tensor | QuantizedRows, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Sequence[Tensor]:
        rows = _quantize(inputs)
        outputs: dict[int, Tensor] = {}
        for group in find_merged_groups(weights, biases):
            weight = self.get(group.weight)
            output = fp8_kernels.scale_products(
                self._multiply(rows, weight),
                rows.scales_R,
                weight.scales_R,
                group.bias,
                dtype=weights[0].dtype,
            )
            parts = output[None].split([len(weights[index]) for index in group.indices], dim=-1)
            outputs.update(zip(group.indices, parts, strict=True))
        return [outputs[index] for index in range(len(weights))]

    def _run_swiglu(self, inputs: Tensor | QuantizedRows, gate_weight: Tensor, value_weight: Tensor) -> QuantizedRows:
        merged = get_merged_view((gate_weight, value_weight))
        if merged is None:
            raise ModelError("engine.weight_format=fp8: gate and up weights of a layer could not be merged")
        rows, weight = _quantize(inputs), self.get(merged)
        return fp8_kernels.silu_and_mul_quantize(self._multiply(rows, weight), rows.scales_R, weight.scales_R)

    def _run_add_linear(self, total: Tensor, inputs: Tensor | QuantizedRows, weight: Tensor) -> Tensor:
        rows, matrix = _quantize(inputs), self.get(weight)
        flat = total.view(-1, total.shape[-1])
        fp8_kernels.add_scaled_products(flat, self._multiply(rows, matrix), rows.scales_R, matrix.scales_R)
        return total


def _run_rms_norm(inputs: Tensor, weight_C: Tensor, epsilon: float) -> QuantizedRows:
    return fp8_kernels.rms_norm_quantize(inputs.reshape(-1, inputs.shape[-1]), weight_C, epsilon)


def _quantize(inputs: Tensor | QuantizedRows) -> QuantizedRows:
    """Rows of the inputs [1, R, K]; already quantized ones unchanged."""
    return inputs if isinstance(inputs, QuantizedRows) else quantize_rows(inputs.reshape(-1, inputs.shape[-1]))
