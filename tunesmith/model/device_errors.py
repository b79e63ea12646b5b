"""Device errors (out of memory, lost device) explained in one sentence each, with what to do."""

from __future__ import annotations

import torch

from tunesmith.errors import LOST_DEVICE_ADVICE, first_line, lacks_host_memory

LOST_DEVICE = ("CUDA error", "device-side assert", "cuBLAS", "CUBLAS", "cudnn", "NVML")
"""First words of errors after which this process cannot use the device any more."""


def is_device_error(error: Exception) -> bool:
    """Whether the device or the host is out of memory, or the device lost to this process."""
    return _is_out_of_memory(error) or _has_lost_device(error)


def explain_device_error(error: Exception, *, work: str, advice: str) -> str:
    """One sentence on why `work` failed; `advice` states how to use less memory."""
    message = f"{work} failed: {type(error).__name__}: {first_line(error)}"
    if _is_out_of_memory(error):
        return f"{message}; {advice}"
    if _has_lost_device(error):
        return f"{message}; {LOST_DEVICE_ADVICE}"
    return message


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or lacks_host_memory(error)


def _has_lost_device(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) or first_line(error).startswith(LOST_DEVICE)
