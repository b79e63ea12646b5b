"""What a GPU did in a piece of work, kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def profile_kernels(work: Callable[[], object], *, num_rows: int = 25) -> list[str]:
    """Time and count of the kernels that took longest, after the sum of all: milliseconds, launches, name.

    The first row also tells how long the GPU was busy, and from the first kernel's begin to the last one's end.
    """
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events)
    cuda = torch.autograd.DeviceType.CUDA
    spans = [(e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == cuda]
    busy, whole = measure_busy(spans)
    count = sum(event.count for event in events)
    rows = [f"{total / 1e3:.3f} ms {count} all kernels, busy {busy / 1e3:.3f} of {whole / 1e3:.3f} ms"]
    return rows + [f"{event.device_time_total / 1e3:.3f} ms {event.count} {event.key}" for event in events[:num_rows]]


def measure_busy(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """How much of the time from the first begin to the last end lies in some span, and that time."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0, 0.0
    first = last = ordered[0][0]
    busy = 0.0
    for begin, end in ordered:
        busy += max(end - max(begin, last), 0.0)
        last = max(last, end)
    return busy, last - first
