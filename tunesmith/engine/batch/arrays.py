"""Arrays of the host: ranges of numbers side by side, and the way to a device that nobody waits on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def join_ranges(firsts_N: NDArray[np.int64], counts_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """`counts_N` numbers up from each of `firsts_N`, one range behind the other."""
    return np.arange(counts_N.sum()) + np.repeat(firsts_N - counts_N.cumsum() + counts_N, counts_N)


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy to a device behind what it does already; from memory that is not pinned the copy would wait for that."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cpu" and array.size:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
