"""What all captured forwards of the engine are built on, and the batch sizes that are captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from transformers import PreTrainedModel

from tunesmith.engine.batch.kv_cache import KVCache
from tunesmith.engine.cuda.decode_work import Divider

CAPTURE_SIZES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphContext:
    """The model and the KV cache that graphs read, and the sizes of their inputs."""

    model: PreTrainedModel
    cache: KVCache
    num_slots: int
    """Maximum number of requests of a forward."""
    num_columns: int
    """Columns of a block table."""
    scratch_block: int
    """The cache block to which padding is written, and which nothing reads."""
    tile_tokens: int
    """Tokens of a tile of the prefill kernel."""
    divider: Divider
    installed: Callable[[], AbstractContextManager[None]]
    """Replaces the layers by fused ones, if the engine has them."""


def choose_capture_size(num_rows: int, num_slots: int) -> int:
    """The smallest captured batch size for `num_rows` rows; at most `num_slots`."""
    size = next((size for size in CAPTURE_SIZES if size >= num_rows), num_slots)
    return max(min(size, num_slots), num_rows)
