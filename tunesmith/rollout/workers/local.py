"""The worker of this process: its engine samples, its event loop runs the workflows.

Between `pause` and `set_version` nothing is sampled, and workflows that are in flight go on with their tools. That time
does not count toward their time limit, nor does that of an evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tunesmith.cluster.links import Link
from tunesmith.experience.finished_group import FinishedGroup
from tunesmith.rollout.actors import Actors, serve_models
from tunesmith.rollout.group import GroupRequest
from tunesmith.rollout.open_sessions import compute_session_stats
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.rollout.workers.group_runner import GroupRunner
from tunesmith.rollout.workers.worker import WindowState, WorkerStatistics, sum_counters
from tunesmith.types import Group


class StepWindows(Protocol):
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


OpenWindows = Callable[[Callable[[bool], None]], StepWindows]
"""Builds the windows in the running event loop; its argument is called when one ends, with whether no engine has
work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherWeights:
    """Take part in gathering the weights of the first rank's engine."""


class LocalWorker:
    """Runs groups in this process."""

    rank = 0

    def __init__(
        self,
        actors: Actors,
        *,
        max_staleness: int = 0,
        keeps_cache: bool = False,
        open_windows: OpenWindows | None = None,
        shard_links: Sequence[Link] = (),
    ) -> None:
        """`open_windows`: for a rank that samples groups in flight together with others; `shard_links`: to the ranks
        that have the other shards of the weights, which the engine gathers when it resumes with a new version."""
        self.actors = actors
        self.max_staleness = max_staleness
        self._shard_links = shard_links
        self._gathered_version: int | None = None
        self._keeps_cache = keeps_cache
        self._open_windows = open_windows
        self._windows: StepWindows | None = None
        self._window: WindowState = "idle"
        self._stack = contextlib.AsyncExitStack()
        self._is_open = False
        self._is_paused = True
        self._statistics: list[WorkerStatistics] = []
        """Counted before an evaluation."""
        self._on_change: Callable[[], None] = lambda: None
        self.groups = self._build_runner()

    @property
    def num_running(self) -> int:
        return len(self.groups.running)

    @property
    def finished(self) -> Sequence[int]:
        return list(self.groups.finished)

    @property
    def window(self) -> WindowState | None:
        return self._window if self._windows is not None and self._windows.has_windows else None

    async def open(self, progress: RolloutProgress, on_change: Callable[[], None]) -> None:
        """The first call serves the models and begins to watch the event loop."""
        self.groups.progress, self._on_change = progress, on_change
        if self._is_open:
            return
        self._is_open = True
        await self._stack.enter_async_context(serve_models(self.actors))
        await self._stack.enter_async_context(self.groups)
        self.groups.on_change = self._note_change
        if self._open_windows is not None:
            self._windows = self._open_windows(self._end_window)

    def raise_error(self) -> None:
        self.groups.raise_error()

    async def set_version(self, policy_version: int) -> list[int]:
        self.end_sampling()
        self._resume_engines(policy_version)
        self.groups.watchdog.resume()
        self._is_paused = False
        return self.groups.drop_stale(policy_version, max_staleness=self.max_staleness)

    def start(self, requests: Sequence[GroupRequest]) -> None:
        self.groups.start(requests)

    def begin_window(self) -> None:
        if self._windows is not None:
            self._window = "sampling"
            self._windows.begin()

    def end_sampling(self) -> None:
        if self._windows is not None:
            self._windows.stop()

    def take(self, numbers: Sequence[int]) -> list[FinishedGroup]:
        return [FinishedGroup(number=number, group=self.groups.finished.pop(number).build()) for number in numbers]

    async def fetch(self, numbers: Sequence[int]) -> list[Group]:
        assert not numbers, "groups of this process are never references"
        return []

    def pause(self) -> None:
        """Auxiliary models share the device with the trainer; they have requests now only if groups are in flight."""
        self._pause_engine()
        if self.max_staleness:
            for engine in self.actors.auxiliary_engines:
                engine.pause()
        if self._windows is not None:
            self._windows.release()
        self.groups.watchdog.pause()
        self._is_paused = True

    async def evaluate(self, requests: Sequence[GroupRequest], *, policy_version: int) -> list[Group]:
        """Groups in flight keep their permits while they wait, so that an evaluation has as many of its own."""
        # counters start anew when they are read: those of training are set aside, those of the evaluation dropped below
        self._statistics.append(self._count())
        async with self._set_aside():
            self._resume_engines(policy_version)
            # permits of its own: groups in flight may hold all of the others while their model calls wait
            async with self._build_runner(self.groups.progress) as runner:
                groups = await runner.run_all(requests)
            self._pause_engine()
        self._count()
        if not self._is_paused:
            self._resume_engines(policy_version)
        return groups

    async def take_statistics(self) -> WorkerStatistics:
        parts, self._statistics = [*self._statistics, self._count()], []
        branching = self.actors.branching
        # sessions that are open are a state, not a sum over time
        counters = sum_counters(parts) | ({} if self.actors.service is None else compute_session_stats())
        return WorkerStatistics(counters=counters, branching=None if branching is None else branching.stats.take())

    async def close(self) -> None:
        if self._windows is not None:
            self._windows.release()
        await self._stack.aclose()

    def _build_runner(self, progress: RolloutProgress | None = None) -> GroupRunner:
        return GroupRunner(self.actors, keeps_cache=self._keeps_cache, progress=progress)

    def _pause_engine(self) -> None:
        if self.actors.engine is not None:
            self.actors.engine.pause()

    def _resume_engines(self, policy_version: int) -> None:
        """An empty prefix cache makes what follows a function of its seed."""
        for auxiliary in self.actors.auxiliary_engines:
            auxiliary.resume(0)
        # before `resume`, which gathers the weights: the other ranks have to be in the collective too
        if policy_version != self._gathered_version:
            self._gathered_version = policy_version
            for link in self._shard_links:
                link.send(GatherWeights())
        engine: Any = self.actors.engine
        if engine is not None:
            engine.resume(policy_version, **({"keeps_cache": True} if self._keeps_cache else {}))

    @contextlib.asynccontextmanager
    async def _set_aside(self) -> AsyncIterator[None]:
        """Let an evaluation have the engine: model calls of the groups in flight wait, their tools do not."""
        if self._windows is not None:
            self._windows.release()
        if not self.max_staleness:
            yield
            return
        engine: Any = self.actors.engine
        if not self._is_paused:
            self.groups.watchdog.pause()
        self.groups.gate.clear()
        engine.hold()
        try:
            yield
        finally:
            engine.release()
            self.groups.gate.set()
            if not self._is_paused:
                self.groups.watchdog.resume()

    def _count(self) -> WorkerStatistics:
        engine, service = self.actors.engine, self.actors.service
        counters = {} if engine is None else dict(engine.compute_stats())
        if service is not None:
            counters |= service.recorder.compute_stats()
        return WorkerStatistics(counters=counters)

    def _end_window(self, is_idle: bool) -> None:
        self._window = "idle" if is_idle else "waiting"
        self._on_change()

    def _note_change(self) -> None:
        if self._windows is not None and self._windows.has_windows:
            self._windows.check_again()
        self._on_change()
