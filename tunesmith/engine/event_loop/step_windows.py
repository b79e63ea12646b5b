"""Windows of engine steps, so that several processes stop sampling at a step and not at a time.

Within a window the event loop steps its engines as always; after `WINDOW_STEPS` steps it stops until the next `begin`.
A window also ends when every coroutine waits and no engine has work; an engine that gets work later is stepped. Without
windows the engines step from `begin` to `stop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tunesmith.engine.event_loop.clock import EngineLoop, Steppable

WINDOW_STEPS = 8


class StepWindows:
    """Counts the steps of the engines of an `EngineLoop`, which steps this before them."""

    def __init__(
        self, loop: EngineLoop, engines: Sequence[Steppable], on_end: Callable[[bool], None], *, has_windows: bool
    ) -> None:
        """`on_end` is called when a window ends, with whether no engine has work; never without windows."""
        self._loop = loop
        self._engines = engines
        self._on_end = on_end
        self.has_windows = has_windows
        self._is_counting = False
        self._is_idle = False
        self._num_steps = 0
        loop.add_engine(self, is_first=True)

    @property
    def has_work(self) -> bool:
        return self._is_counting and (not self._is_idle or self._are_working)

    @property
    def _are_working(self) -> bool:
        return any(engine.has_work for engine in self._engines)

    def begin(self) -> None:
        """Let the engines step, from the start of a window."""
        self._is_counting, self._is_idle, self._num_steps = self.has_windows, False, 0
        self._loop.is_stepping = True

    def stop(self) -> None:
        """Let no engine step; their requests wait, and everything else on the event loop continues."""
        self._is_counting = self._loop.is_stepping = False

    def release(self) -> None:
        """Let the engines step without windows."""
        self._is_counting, self._loop.is_stepping = False, True

    def check_again(self) -> None:
        """Call `on_end` once more if the engines still have no work when every coroutine waits."""
        self._is_idle = False

    def step(self) -> None:
        """Count a step that the engines are about to make; called when every coroutine waits."""
        if not self._are_working:
            self._is_idle = True
            self._loop.call_soon(self._on_end, True)
        elif self._num_steps == WINDOW_STEPS:
            self._loop.is_stepping = False
            self._loop.call_soon(self._on_end, False)  # not within this step, which then ends here in any case
        else:
            self._num_steps += 1


def open_windows(on_end: Callable[[bool], None], *, engines: Sequence[Steppable], has_windows: bool) -> StepWindows:
    """The windows of the running event loop, which is an `EngineLoop`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, EngineLoop), "runs use run_lockstep"
    return StepWindows(loop, engines, on_end, has_windows=has_windows)
