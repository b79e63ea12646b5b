"""The groups in flight that run in this process: they are started, finish, and are dropped when they become too old.

Between `pause` and `resume` nothing is sampled and workflows go on with their tools. That time does not count toward
their time limit. On a CPU, which groups finish first depends on time only where workflows do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tunesmith.errors import RolloutError
from tunesmith.rollout.actors import Actors, RolloutProgress, serve_models
from tunesmith.rollout.in_flight.running_group import RunningGroup, StartedGroup, WatchedModel
from tunesmith.rollout.in_flight.work_thread import WorkThread
from tunesmith.rollout.runner import run_trajectory
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.watchdog import BLOCKED_LIMIT_S, EventLoopWatchdog, watch_event_loop
from tunesmith.types import Group

T = TypeVar("T")


class HoldingEngine(Protocol):
    """An engine whose unfinished requests outlast a change of the weights."""

    @property
    def policy_version(self) -> int: ...

    def pause(self) -> None: ...

    def resume(self, policy_version: int, *, keeps_cache: bool = False) -> None:
        """Continue with the current weights; unfinished requests are computed again unless `keeps_cache`."""
        ...

    def hold(self) -> None:
        """Pause, and set unfinished requests aside."""
        ...

    def release(self) -> None:
        """Pause, and put them back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlightLimits:
    """How many groups are in flight, and how old they may become."""

    group_size: int
    batch_size: int
    max_staleness: int
    total_steps: int
    keeps_cache: bool = False

    def count_groups(self, num_needed: int, *, step: int) -> int:
        """Groups in flight when a step needs this many: also those of the next `max_staleness` steps, if they come."""
        return num_needed + min(self.max_staleness, self.total_steps - step) * self.batch_size


class OwnGroups:
    """The groups in flight of this process; the site of all of them if it is the only one."""

    def __init__(
        self,
        actors: Actors,
        engine: HoldingEngine,
        limits: InFlightLimits,
        *,
        seed: int,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`engine` is that of the actors; `prepare_thread` runs once in the thread of `run_beside`."""
        self._actors = actors
        self._engine = engine
        self._limits = limits
        self._seed = seed
        self.running: dict[int, RunningGroup] = {}
        self.complete: dict[int, RunningGroup] = {}
        """Waiting to be trained. Both by number."""
        self.progress = RolloutProgress()
        """Collects the trajectories that finish."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a group is complete, or an error has occurred."""
        self._queue: deque[tuple[RunningGroup, int]] = deque()
        """Rollouts that have not started."""
        self._dropped: list[int] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._stack = contextlib.AsyncExitStack()
        self._watchdog: EventLoopWatchdog | None = None
        self._slots = asyncio.Semaphore(actors.max_concurrency)
        self._gate, self._queued, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._thread = WorkThread(prepare_thread)

    @property
    def num_waiting(self) -> int:
        return len(self.complete)

    def resume(self, policy_version: int) -> None:
        """Continue sampling, with the current weights; groups that became too old are dropped."""
        for engine in self._actors.auxiliary_engines:
            engine.resume(0)
        self._engine.resume(policy_version, keeps_cache=self._limits.keeps_cache)
        self._drop_stale(policy_version)
        if self._watchdog is not None:
            self._watchdog.resume()

    def pause(self) -> None:
        """Stop sampling, auxiliary models included, which share the device with the trainer."""
        self._engine.pause()
        for engine in self._actors.auxiliary_engines:
            engine.pause()
        if self._watchdog is not None:
            self._watchdog.pause()

    async def settle(self) -> list[int]:
        """Make ready for rollouts; returns the numbers of the groups dropped since the last call."""
        await self.open()
        dropped, self._dropped = self._dropped, []
        return dropped

    async def run(self, started: Sequence[StartedGroup], num_groups: int) -> list[int]:
        """Start groups, and wait until `num_groups` are complete; returns the numbers of all complete ones."""
        self.start(started)
        while len(self.complete) < num_groups:
            await self.wait()
        self.raise_error()
        return list(self.complete)

    async def take(self, numbers: Sequence[int]) -> list[Group]:
        """Give away complete groups."""
        return [self.complete.pop(number).build() for number in numbers]

    def compute_metrics(self) -> dict[str, float]:
        """Metrics of the site since the last call."""
        return {}

    async def open(self) -> None:
        """Serve the models and start the launcher, once."""
        if self._watchdog is not None:
            return
        agent = self._actors.agent
        await self._stack.enter_async_context(serve_models(self._actors))
        watched = watch_event_loop(agent.logger, limit_s=min(BLOCKED_LIMIT_S, agent.timeout_s / 4))
        self._watchdog = self._stack.enter_context(watched)
        self._add_task(self._launch())

    def start(self, started: Sequence[StartedGroup]) -> None:
        """Put groups in flight."""
        for each in started:
            group = RunningGroup(number=each.number, task=each.task, size=self._limits.group_size)
            self.running[group.number] = group
            self._queue += [(group, run_index) for run_index in range(group.size)]
        self._queued.set()

    async def wait(self) -> None:
        """Wait for a change; raises the error of a rollout."""
        self.raise_error()
        self._changed.clear()
        await self._changed.wait()
        self.raise_error()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def run_beside(self, work: Callable[[], T]) -> T:
        """Run an update or a save in a thread, while workflows continue; a cancellation waits for its end."""
        return await self._thread.run(work)

    async def train(self, update: Callable[[], T], *, policy_version: int) -> T:
        """As `run_beside`, for the update that makes the weights of `policy_version`."""
        return await self.run_beside(update)

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Let other rollouts have the engine: model calls of the groups in flight wait, their tools do not."""
        self._gate.clear()
        self._engine.hold()
        try:
            yield
        finally:
            self._engine.release()
            self._gate.set()

    async def close(self) -> None:
        """Cancel everything in flight."""
        for group in (*self.running.values(), *self.complete.values()):
            group.drop()
        self.running.clear()
        self.complete.clear()
        self._gate.set()
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._stack.aclose()
        self._thread.close()

    def _drop_stale(self, policy_version: int) -> None:
        """Drop groups whose oldest token is older than a step of this version may train."""
        groups = self.running | self.complete
        for number in sorted(groups):
            oldest = groups[number].find_oldest_version()
            if oldest is not None and policy_version - oldest > self._limits.max_staleness:
                self.running.pop(number, None)
                self.complete.pop(number, None)
                groups[number].drop()
                self._dropped.append(number)

    async def _launch(self) -> None:
        """Start rollouts in order while fewer than `max_concurrency` run."""
        while True:
            await self._slots.acquire()
            while not self._queue:
                self._queued.clear()
                await self._queued.wait()
            group, run_index = self._queue.popleft()
            if group.is_dropped:
                self._slots.release()
            else:
                group.runs.append(self._add_task(self._run(group, run_index), group))

    def _add_task(self, work: Coroutine[Any, Any, None], group: RunningGroup | None = None) -> asyncio.Task[None]:
        """Start a task whose error `wait` raises; that of a rollout holds a slot until it ends."""

        def note_end(task: asyncio.Task[None]) -> None:
            if group is not None:
                self._slots.release()  # not by the rollout itself, which may be cancelled before its first line
            if task not in self._tasks:
                return  # cancelled by `close`
            self._tasks.discard(task)
            if task.cancelled():
                if group is None or not group.is_dropped:
                    self._error = RolloutError("user code cancelled a rollout in flight: cancel only tasks it made")
            elif task.exception() is not None:
                self._error = task.exception()
            self._note_change()

        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(note_end)
        return task

    def _note_change(self) -> None:
        self._changed.set()
        self.on_change()

    async def _run(self, group: RunningGroup, run_index: int) -> None:
        actors, limits = self._actors, self._limits
        source = actors.model or actors.service
        trajectory = await run_trajectory(
            group.task,
            run_index,
            agent=actors.agent,
            model=WatchedModel(source, group, run_index, gate=self._gate, keeps_cache=limits.keeps_cache),
            auxiliary_models=actors.auxiliary_models,
            seed=derive_seed(self._seed, "in flight", group.number, group.task.task_id, run_index),
            order=(group.number, run_index),
            watchdog=self._watchdog,
        )
        if group.is_dropped:
            return
        group.add(run_index, trajectory)
        self.progress.finished.append(trajectory)
        if group.is_complete:
            self.complete[group.number] = self.running.pop(group.number)
            self._note_change()
        if self.progress.status is not None:
            num_groups = len(self.running) + len(self.complete)
            self.progress.status.show_status(f"{len(self.complete)} groups complete of {num_groups}")
