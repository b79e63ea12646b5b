"""Capture of CUDA graphs, one per batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tunesmith.cluster.ranks import count_ranks

CAPTURE_SIZES = (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)


def choose_capture_size(num_rows: int, num_slots: int) -> int:
    """The smallest captured batch size for `num_rows` rows; at most `num_slots`."""
    size = next((size for size in CAPTURE_SIZES if size >= num_rows), num_slots)
    return max(min(size, num_slots), num_rows)


def capture_graph(run_step: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """Run a step twice to warm up, then capture it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run_step()
    torch.cuda.current_stream().wait_stream(stream)
    # with several ranks, NCCL's watchdog queries events from a thread of its own
    mode = "thread_local" if count_ranks() > 1 else "global"
    with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
        run_step()
    return graph
