"""Profile of the GPU kernels that a function launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch._C._autograd import DeviceType


def profile_kernels(work: Callable[[], object], *, num_rows: int = 25) -> list[str]:
    """Rows of milliseconds, launches and name: the sum of all kernels, then the kernels that took longest.

    The first row also has the time for which the GPU was busy, and the time from the first start to the last end.
    """
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events)
    cuda = DeviceType.CUDA
    spans = [(e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == cuda]
    busy, whole = measure_busy(spans)
    count = sum(event.count for event in events)
    rows = [f"{total / 1e3:.3f} ms {count} all kernels, busy {busy / 1e3:.3f} of {whole / 1e3:.3f} ms"]
    return rows + [f"{event.device_time_total / 1e3:.3f} ms {event.count} {event.key}" for event in events[:num_rows]]


def measure_busy(spans: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Time covered by the spans, and time from the first start to the last end."""
    ordered = sorted(spans)
    if not ordered:
        return 0.0, 0.0
    first = last = ordered[0][0]
    busy = 0.0
    for start, end in ordered:
        busy += max(end - max(start, last), 0.0)
        last = max(last, end)
    return busy, last - first
