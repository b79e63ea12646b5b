"""NumPy arrays of the host: concatenated integer ranges, and non-blocking copies to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def concatenate_ranges(starts_N: NDArray[np.int64], counts_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ranges of `counts_N` consecutive integers from each of `starts_N`, concatenated."""
    return np.arange(counts_N.sum()) + np.repeat(starts_N - counts_N.cumsum() + counts_N, counts_N)


def copy_to_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Non-blocking host-to-device copy; the array is pinned first, for a copy from pageable memory would wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype=dtype)
    if device.type != "cpu" and array.size:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
