"""Time that does not count toward the time limit of a rollout: it waits for its turn and nothing of it runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar


class UncountedTime:
    """The seconds of one rollout that do not count."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._since: float | None = None

    def compute_s(self) -> float:
        """Seconds so far, the current wait included."""
        return self._ended_s + (0.0 if self._since is None else time.monotonic() - self._since)

    def bind(self) -> None:
        """Let `uncounted_time` in the current asyncio task count here."""
        _current.set(self)

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._ended_s, self._since = self.compute_s(), None


_current: ContextVar[UncountedTime | None] = ContextVar("uncounted_time", default=None)


def uncounted_time() -> contextlib.AbstractContextManager[None]:
    """A block of a workflow whose time does not count toward the rollout's time limit."""
    current = _current.get()
    return contextlib.nullcontext() if current is None else current.measure()
