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


def list_tiles(starts_R: NDArray[np.int64], lengths_R: NDArray[np.int64], tile_tokens: int) -> NDArray[np.int32]:
    """Tiles [2, I] of at most `tile_tokens` new tokens of one request: the request, and the offset in its new tokens.

    `starts_R` tokens are before them. Tiles with the most context come first: programs begin in this order, and a long
    one that begins last would run alone.
    """
    num_tiles_R = -(-lengths_R // tile_tokens)
    requests_I = np.repeat(np.arange(len(starts_R)), num_tiles_R)
    offsets_I = concatenate_ranges(np.zeros_like(starts_R), num_tiles_R) * tile_tokens
    order_I = np.argsort(-(starts_R[requests_I] + offsets_I), kind="stable")
    return np.array([requests_I[order_I], offsets_I[order_I]], dtype=np.int32)


def pad_tiles(tiles_2I: NDArray[np.int32], num_tiles: int, *, empty: int) -> NDArray[np.int32]:
    """Append tiles of the request `empty`, which has no tokens. They are at its start, since a tile attends to all that
    is before its first token."""
    num_added = num_tiles - tiles_2I.shape[1]
    return np.concatenate([tiles_2I, np.array([[empty], [0]], dtype=np.int32).repeat(num_added, axis=1)], axis=1)
