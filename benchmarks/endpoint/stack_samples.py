"""Where a block of code spends its processor time: samples of the stack, which distort less than cProfile."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERVAL_S = 0.001


class StackSamples:
    """Counts of functions on sampled stacks of the main thread."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.running: Counter[str] = Counter()
        """By function and line: samples in which it ran itself."""
        self.on_stack: Counter[str] = Counter()
        """By function: samples in which it or a function that it called ran."""

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Sample until the block ends."""
        before = signal.signal(signal.SIGPROF, self._add)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, before)

    def _add(self, number: int, frame: FrameType | None) -> None:
        self.num_samples += 1
        names = []
        while frame is not None:
            folder, _, file = frame.f_code.co_filename.rpartition("/")
            names.append(f"{folder.rpartition('/')[2]}/{file}:{frame.f_code.co_qualname}")
            if len(names) == 1:
                self.running[f"{names[0]}:{frame.f_lineno}"] += 1
            frame = frame.f_back
        self.on_stack.update(set(names))

    def report(self, *, num_lines: int = 60) -> str:
        """Shares of the samples, largest first."""
        lines = [f"{self.num_samples} samples; on the stack:"]
        for title, counts in (("", self.on_stack), ("running:", self.running)):
            lines += [title] if title else []
            lines += [
                f"{100 * count / self.num_samples:6.1f} % {name}" for name, count in counts.most_common(num_lines)
            ]
        return "\n".join(lines)
