"""How kernels of a captured step follow each other.

Chained kernels use programmatic dependent launch: a kernel may be put on the device while the one before it ends, and
waits there until that one's writes are visible. Hopper and later can do it; on other devices kernels queue plainly.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def begin(IS_CHAINED: tl.constexpr):
    """First statement of a kernel, before it touches memory: wait for the kernel before, and let the next one come."""
    if IS_CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def get_launch_options() -> dict[str, Any]:
    """Keyword arguments of every launch."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return {"IS_CHAINED": False}
    return {"IS_CHAINED": True, "launch_pdl": True}
