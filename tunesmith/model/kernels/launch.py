"""Programmatic dependent launch (PDL) between the kernels of a captured decode step.

With PDL a kernel is scheduled while the previous kernel still finishes, and waits on the device until the previous
kernel's writes are visible. It needs compute capability 9.0 (Hopper); on older devices kernels run one after another.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def pdl_wait(HAS_PDL: tl.constexpr):
    """First statement of a kernel, before any memory access: wait for the previous kernel, release the next one."""
    if HAS_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def get_launch_options() -> dict[str, Any]:
    """Keyword arguments of every kernel launch."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return {"HAS_PDL": False}
    return {"HAS_PDL": True, "launch_pdl": True}
