"""What a GPU did in a piece of work, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch


def profile_kernels(work: Callable[[], object], *, num_rows: int = 25) -> list[str]:
    """Time and count of the kernels that took longest, after the sum of all: milliseconds, launches, name."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events)
    rows = [f"{total / 1e3:.3f} ms {sum(event.count for event in events)} all kernels"]
    return rows + [f"{event.device_time_total / 1e3:.3f} ms {event.count} {event.key}" for event in events[:num_rows]]
