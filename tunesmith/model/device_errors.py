"""What went wrong on the device, and what to do about it, in one sentence each."""

from __future__ import annotations

import torch

from tunesmith.errors import LOST_DEVICE_ADVICE

LOST_DEVICE = ("CUDA error", "device-side assert", "cuBLAS", "CUBLAS", "cudnn", "NVML")
"""What errors begin with after which this process can use the device no more."""


def is_device_failure(error: Exception) -> bool:
    """The device is out of memory, or lost to this process."""
    return isinstance(error, torch.OutOfMemoryError) or _has_lost_device(error)


def explain_failure(error: Exception, *, work: str, advice: str) -> str:
    """Why the work failed; `advice` is how it needs less memory."""
    message = f"{work} failed: {type(error).__name__}: {_get_first_line(error)}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"{message}; {advice}"
    if _has_lost_device(error):
        return f"{message}; {LOST_DEVICE_ADVICE}"
    return message


def _has_lost_device(error: Exception) -> bool:
    is_accelerator = isinstance(error, getattr(torch, "AcceleratorError", ()))
    return is_accelerator or _get_first_line(error).startswith(LOST_DEVICE)


def _get_first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
