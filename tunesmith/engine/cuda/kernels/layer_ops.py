"""The CUDA implementations that fused decoder layers of the engine call."""

from __future__ import annotations

import torch

import tunesmith.model.kernels.expert_pairs
import tunesmith.model.kernels.recurrent_steps  # noqa: F401  (both register their operations)
from tunesmith.engine.cuda import custom_ops as ops
from tunesmith.engine.cuda.kernels.adapters import add_adapters
from tunesmith.engine.cuda.kernels.paged_decode import run_paged_decode
from tunesmith.model.forward.fx_passes import FusedOps
from tunesmith.model.kernels.layer_ops import add_linear, merged_linear, rms_norm, silu_and_mul
from tunesmith.model.kernels.paged_prefill import run_paged_prefill

torch.library.impl("tunesmith::paged_prefill", "CUDA")(run_paged_prefill)
CUDA_OPS = FusedOps(
    rms_norm=rms_norm,
    merged_linear=merged_linear,
    silu_and_mul=silu_and_mul,
    add_linear=add_linear,
    add_adapters=add_adapters,
    attention={ops.paged_decode: run_paged_decode, ops.paged_prefill: run_paged_prefill},
)
