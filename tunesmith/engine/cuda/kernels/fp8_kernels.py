"""Kernels around products of FP8 matrices: rows are quantized before a product and scaled after it.

A row x becomes e4m3 numbers x / s with s = max|x| / 448. A product of two matrices quantized by rows is the product of
the e4m3 numbers, times the scale of its row, times the scale of its column. The kernels after a product apply both.

Axes: R rows, K columns, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tunesmith.model.kernels.launch import get_launch_options, pdl_wait

FP8_DTYPE = torch.float8_e4m3fn
TILE = 4096
"""Columns that a program holds at once."""
MAX_ROW = 32768
"""Columns up to which a program holds the whole row of SiLU(gate) * value, so that it is computed once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows:
    """Rows in FP8; an element is `values_RK` times the scale of its row."""

    values_RK: Tensor
    scales_R: Tensor

    def dequantize(self) -> Tensor:
        return self.values_RK.float() * self.scales_R[:, None]


@triton.jit
def _choose_scale(maximum):
    return tl.where(maximum > 0, maximum / 448.0, 1.0)


@triton.jit
def _store_fp8(values, columns, x, scale, is_used):
    quantized = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    tl.store(values + columns, quantized.to(tl.float8e4nv), mask=is_used)


@triton.jit
def _quantize_rows_kernel(inputs, values, scales, size, input_stride, TILE: tl.constexpr, HAS_PDL: tl.constexpr):
    pdl_wait(HAS_PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    inputs += row * input_stride
    maxima = tl.zeros((TILE,), tl.float32)
    for start in range(0, size, TILE):
        x = tl.load(inputs + start + columns, mask=start + columns < size, other=0.0).to(tl.float32)
        maxima = tl.maximum(maxima, tl.abs(x))
    scale = _choose_scale(tl.max(maxima, axis=0))
    for start in range(0, size, TILE):
        is_used = start + columns < size
        x = tl.load(inputs + start + columns, mask=is_used, other=0.0).to(tl.float32)
        _store_fp8(values + row * size, start + columns, x, scale, is_used)
    tl.store(scales + row, scale)


@triton.jit
def _rms_norm_quantize_kernel(
    inputs, weight, values, scales, epsilon, size, input_stride, TILE: tl.constexpr, HAS_PDL: tl.constexpr
):  # fmt: skip
    pdl_wait(HAS_PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    is_used = columns < size
    x = tl.load(inputs + row * input_stride + columns, mask=is_used, other=0.0).to(tl.float32)
    factor = tl.load(weight + columns, mask=is_used, other=0.0)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / size + epsilon)).to(inputs.dtype.element_ty)
    y = (normed * factor).to(weight.dtype.element_ty).to(tl.float32)
    scale = _choose_scale(tl.max(tl.abs(y), axis=0))
    _store_fp8(values + row * size, columns, y, scale, is_used)
    tl.store(scales + row, scale)


@triton.jit
def _load_activated(products, columns, row_scale, column_scales, size, is_used, dtype: tl.constexpr):
    """SiLU(gate) * value of unscaled products, rounded where transformers' modules round."""
    gate = tl.load(products + columns, mask=is_used, other=0.0).to(tl.float32)
    value = tl.load(products + size + columns, mask=is_used, other=0.0).to(tl.float32)
    gate *= row_scale * tl.load(column_scales + columns, mask=is_used, other=0.0)
    value *= row_scale * tl.load(column_scales + size + columns, mask=is_used, other=0.0)
    gate = gate.to(dtype).to(tl.float32)
    return ((gate * tl.sigmoid(gate)).to(dtype) * value.to(dtype)).to(tl.float32)


@triton.jit
def _silu_and_mul_quantize_kernel(
    products, row_scales, column_scales, values, scales, size,
    IS_WHOLE_ROW: tl.constexpr, TILE: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(HAS_PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    dtype: tl.constexpr = products.dtype.element_ty
    products += row * 2 * size
    values += row * size
    row_scale = tl.load(row_scales + row)
    if IS_WHOLE_ROW:
        x = _load_activated(products, columns, row_scale, column_scales, size, columns < size, dtype)
        scale = _choose_scale(tl.max(tl.abs(x), axis=0))
        _store_fp8(values, columns, x, scale, columns < size)
    else:
        maxima = tl.zeros((TILE,), tl.float32)
        for start in range(0, size, TILE):
            is_used = start + columns < size
            x = _load_activated(products, start + columns, row_scale, column_scales, size, is_used, dtype)
            maxima = tl.maximum(maxima, tl.abs(x))
        scale = _choose_scale(tl.max(maxima, axis=0))
        for start in range(0, size, TILE):
            is_used = start + columns < size
            x = _load_activated(products, start + columns, row_scale, column_scales, size, is_used, dtype)
            _store_fp8(values, start + columns, x, scale, is_used)
    tl.store(scales + row, scale)


@triton.jit
def _scale_kernel(
    products, row_scales, column_scales, bias, output, size,
    HAS_BIAS: tl.constexpr, HAS_TOTAL: tl.constexpr, TILE: tl.constexpr, HAS_PDL: tl.constexpr,
):  # fmt: skip
    pdl_wait(HAS_PDL)
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_used = columns < size
    x = tl.load(products + row * size + columns, mask=is_used, other=0.0).to(tl.float32)
    x *= tl.load(row_scales + row) * tl.load(column_scales + columns, mask=is_used, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=is_used, other=0.0).to(tl.float32)
    if HAS_TOTAL:
        x += tl.load(output + row * size + columns, mask=is_used, other=0.0).to(tl.float32)
    tl.store(output + row * size + columns, x.to(output.dtype.element_ty), mask=is_used)


def _choose_tile(size: int) -> tuple[int, int]:
    """Columns of a tile, and warps."""
    tile = min(triton.next_power_of_2(size), TILE)
    return tile, 2 if tile <= 1024 else 8


def allocate_rows(num_rows: int, size: int, device: torch.device) -> QuantizedRows:
    return QuantizedRows(
        values_RK=torch.empty((num_rows, size), dtype=FP8_DTYPE, device=device),
        scales_R=torch.empty(num_rows, dtype=torch.float32, device=device),
    )


def quantize_rows(inputs_RK: Tensor, *, out: QuantizedRows | None = None) -> QuantizedRows:
    """Quantize each row; the last axis must be contiguous."""
    num_rows, size = inputs_RK.shape
    rows = allocate_rows(num_rows, size, inputs_RK.device) if out is None else out
    tile, num_warps = _choose_tile(size)
    _quantize_rows_kernel[(num_rows,)](
        inputs_RK, rows.values_RK, rows.scales_R, size, inputs_RK.stride(0), TILE=tile, num_warps=num_warps,
        **get_launch_options(),
    )  # fmt: skip
    return rows


def rms_norm_quantize(inputs_RK: Tensor, weight_K: Tensor, epsilon: float) -> QuantizedRows:
    """RMS norm in the weight's dtype, then quantized."""
    num_rows, size = inputs_RK.shape
    rows = allocate_rows(num_rows, size, inputs_RK.device)
    tile = triton.next_power_of_2(size)
    _rms_norm_quantize_kernel[(num_rows,)](
        inputs_RK, weight_K, rows.values_RK, rows.scales_R, epsilon, size, inputs_RK.stride(0),
        TILE=tile, num_warps=2 if tile <= 1024 else 8, **get_launch_options(),
    )  # fmt: skip
    return rows


def silu_and_mul_quantize(products_R2I: Tensor, row_scales_R: Tensor, column_scales_2I: Tensor) -> QuantizedRows:
    """SiLU of the first half of the scaled products, times the second half, quantized."""
    num_rows, size = products_R2I.shape[0], products_R2I.shape[1] // 2
    rows = allocate_rows(num_rows, size, products_R2I.device)
    is_whole_row = size <= MAX_ROW
    tile, num_warps = (triton.next_power_of_2(size), 16) if is_whole_row and size > TILE else _choose_tile(size)
    _silu_and_mul_quantize_kernel[(num_rows,)](
        products_R2I, row_scales_R, column_scales_2I, rows.values_RK, rows.scales_R, size,
        IS_WHOLE_ROW=is_whole_row, TILE=tile, num_warps=num_warps, **get_launch_options(),
    )  # fmt: skip
    return rows


def scale_products(
    products_RK: Tensor, row_scales_R: Tensor, column_scales_K: Tensor, bias_K: Tensor | None, *, dtype: torch.dtype
) -> Tensor:
    """The products times the scales of their rows and columns, plus a bias."""
    output = torch.empty(products_RK.shape, dtype=dtype, device=products_RK.device)
    _launch_scale(products_RK, row_scales_R, column_scales_K, bias_K, output, has_total=False)
    return output


def add_scaled_products(total_RK: Tensor, products_RK: Tensor, row_scales_R: Tensor, column_scales_K: Tensor) -> None:
    """total += products, times the scales of their rows and columns."""
    _launch_scale(products_RK, row_scales_R, column_scales_K, None, total_RK, has_total=True)


def _launch_scale(
    products_RK: Tensor, row_scales_R: Tensor, column_scales_K: Tensor, bias_K: Tensor | None, output_RK: Tensor,
    *, has_total: bool,
) -> None:  # fmt: skip
    num_rows, size = products_RK.shape
    tile = min(triton.next_power_of_2(size), 1024)
    _scale_kernel[(num_rows, triton.cdiv(size, tile))](
        products_RK, row_scales_R, column_scales_K, products_RK if bias_K is None else bias_K, output_RK, size,
        HAS_BIAS=bias_K is not None, HAS_TOTAL=has_total, TILE=tile, num_warps=4, **get_launch_options(),
    )  # fmt: skip
