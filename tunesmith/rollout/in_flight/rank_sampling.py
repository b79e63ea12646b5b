"""When several ranks stop sampling: as soon as enough groups are complete over all of them.

Each rank reports its complete groups while it samples, and the first rank tells all to stop. Where time must not
matter, ranks sample in windows of engine steps: a rank reports after each window and waits until all others have
reported or have nothing to sample. So they stop at a step that is a function of what they sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tunesmith.cluster.links import build_silence_error
from tunesmith.rollout.in_flight.own_groups import OwnGroups

SamplingState = Literal["sampling", "waiting", "idle"]
"""Of a rank: within a window, at its end, or without requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingReport:
    """What a rank sends to the first one while it samples."""

    phase: int
    """Number of phases of sampling before this one."""
    state: SamplingState
    complete: Sequence[int]
    """Numbers of its complete groups."""


@dataclass(slots=True, kw_only=True)
class SamplingPhase:
    """One phase of sampling on all ranks, as the first one sees it."""

    number: int
    num_needed: int
    complete: dict[int, Sequence[int]]
    """Numbers of complete groups by rank."""
    has_windows: bool
    has_ended: bool = False
    """Whether enough groups were complete, in windows at a moment where no rank was within one."""
    states: dict[int, SamplingState] = field(init=False)

    def __post_init__(self) -> None:
        self.states = dict.fromkeys(self.complete, "sampling")

    def add(self, rank: int, report: SamplingReport) -> None:
        """Take in a report of this phase."""
        self.states[rank], self.complete[rank] = report.state, report.complete
        is_between = not self.has_windows or "sampling" not in self.states.values()
        self.has_ended = is_between and sum(map(len, self.complete.values())) >= self.num_needed

    def begin_windows(self) -> list[int]:
        """The ranks that sample on: those that have waited for all others."""
        if "sampling" in self.states.values():
            return []
        ranks = [rank for rank, state in self.states.items() if state == "waiting"]
        self.states |= dict.fromkeys(ranks, "sampling")
        return ranks


class SamplingClock(Protocol):
    """Lets the engines of this process step, or not."""

    @property
    def has_windows(self) -> bool:
        """Whether the engines stop after a number of steps, and when they have no work; else they step until `stop`."""

    def begin(self) -> None: ...

    def stop(self) -> None:
        """Let no engine step; their requests wait, and everything else continues."""

    def release(self) -> None:
        """Let the engines step without windows."""

    def check_again(self) -> None:
        """Report again if the engines have no work, because something else has changed."""


OpenClock = Callable[[Callable[[bool], None]], SamplingClock]
"""Builds the clock in the running event loop; its argument is called when a window ends, with whether no engine has
work."""


class RankSampling:
    """The sampling of this rank in each phase."""

    def __init__(
        self, own: OwnGroups, open_clock: OpenClock, report: Callable[[SamplingReport], None], *, timeout_s: float
    ) -> None:
        """`timeout_s`: longest time in which neither this rank nor, on the first one, another reports."""
        self._own = own
        self._timeout_s = timeout_s
        self._num_reports = 0
        self._report = report
        self._phase = -1
        self._ended: asyncio.Future[None] | None = None
        self.clock = open_clock(self._end_window)
        self._own.on_change = self._note_change

    async def run(self, phase: int) -> None:
        """Sample until `stop`; raises an error of a rollout, or that of `fail`."""
        self._phase, self._ended = phase, asyncio.get_running_loop().create_future()
        self.clock.begin()
        if not self.clock.has_windows:
            self._send("sampling")
        try:
            self._own.raise_error()
            await self._wait(self._ended)
        finally:
            self._ended = None
            self.clock.stop()

    async def _wait(self, ended: asyncio.Future[None]) -> None:
        num_reports = -1
        while not ended.done():
            if num_reports == self._num_reports:
                raise build_silence_error(self._timeout_s)
            num_reports = self._num_reports
            await asyncio.wait({ended}, timeout=self._timeout_s)
        ended.result()

    def note_report(self) -> None:
        """A rank has reported."""
        self._num_reports += 1

    def begin_window(self, phase: int) -> None:
        """Sample on in this phase."""
        if phase != self._phase or self._ended is None or self._ended.done():
            return
        self.clock.begin()

    def stop(self, phase: int) -> None:
        """End this phase."""
        if phase == self._phase and self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the phase with an error."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _end_window(self, is_idle: bool) -> None:
        self._send("idle" if is_idle else "waiting")

    def _note_change(self) -> None:
        if self._ended is None:
            return
        try:
            self._own.raise_error()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self.fail(error)
            return
        if self.clock.has_windows:
            self.clock.check_again()
        else:
            self._send("sampling")

    def _send(self, state: SamplingState) -> None:
        self.note_report()
        self._report(SamplingReport(phase=self._phase, state=state, complete=sorted(self._own.complete)))


def list_complete(complete: Mapping[int, Sequence[int]]) -> list[int]:
    """Numbers of the complete groups of all ranks."""
    return sorted(number for numbers in complete.values() for number in numbers)
