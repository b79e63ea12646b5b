"""Windows of engine steps, so that several processes stop sampling at a step and not at a time.

Within a window the event loop steps its engines as always; after `WINDOW_STEPS` steps it stops until the next `begin`.
A window also ends when every coroutine waits and no engine has work; an engine that gets work later is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tunesmith.engine.event_loop.clock import EngineLoop, Steppable

WINDOW_STEPS = 8


class StepWindows:
    """Counts the steps of the engines of an `EngineLoop`, which steps this before them."""

    def __init__(self, loop: EngineLoop, engines: Sequence[Steppable], on_end: Callable[[bool], None]) -> None:
        """`on_end` is called when a window ends, with whether no engine has work."""
        self._loop = loop
        self._engines = engines
        self._on_end = on_end
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
        """Start a window."""
        self._is_counting, self._is_idle, self._num_steps = True, False, 0
        self._loop.is_stepping = True

    def stop(self) -> None:
        """Do not count any more."""
        self._is_counting = False

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
