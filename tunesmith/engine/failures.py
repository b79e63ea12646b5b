"""What went wrong on the device, and what to do about it, in one sentence each."""

from __future__ import annotations

import torch

LOST_DEVICE = ("CUDA error", "device-side assert", "cuBLAS", "CUBLAS", "cudnn", "NVML")
"""What errors begin with after which this process can use the device no more."""


def explain_failure(error: Exception) -> str:
    """Why a step failed, with the knob to turn or the way to go on."""
    first_line = (str(error).splitlines() or [""])[0]
    message = f"a step of the engine failed: {type(error).__name__}: {first_line}"
    if isinstance(error, torch.OutOfMemoryError):
        return f"{message}; lower engine.kv_cache_gib, engine.max_num_seqs or engine.max_batched_tokens"
    is_accelerator = isinstance(error, getattr(torch, "AcceleratorError", ()))
    if is_accelerator or first_line.startswith(LOST_DEVICE):
        return (
            f"{message}; the device is lost to this process: start the run again, "
            "and it goes on from its last checkpoint"
        )
    return message
