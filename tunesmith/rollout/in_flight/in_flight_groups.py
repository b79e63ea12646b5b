"""Groups in flight: more than a step needs, so that a step waits for the first complete ones and not for the slowest.

`take` returns complete groups, in the order of their start; the others continue under the next weights. A group whose
oldest token would be trained more than `max_staleness` steps after it was sampled is dropped, and its task runs again.
Between `pause` and `resume` nothing is sampled and workflows go on with their tools. That time does not count toward
their time limit. On a CPU, what a step trains depends on time only where workflows do.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tunesmith.errors import RolloutError
from tunesmith.rollout.actors import Actors, RolloutProgress, serve_models
from tunesmith.rollout.in_flight.running_group import RunningGroup, WatchedModel
from tunesmith.rollout.runner import run_trajectory
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.watchdog import BLOCKED_LIMIT_S, EventLoopWatchdog, watch_event_loop
from tunesmith.tasks.task_feed import TaskFeed
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


class InFlightGroups:
    """The groups in flight of a run on one rank."""

    def __init__(
        self,
        actors: Actors,
        engine: HoldingEngine,
        feed: TaskFeed,
        limits: InFlightLimits,
        *,
        seed: int,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`engine` is that of the actors; `prepare_thread` runs once in the thread of `run_beside`."""
        self._actors = actors
        self._engine = engine
        self._feed = feed
        self._limits = limits
        self._seed = seed
        self._running: dict[int, RunningGroup] = {}
        self._complete: dict[int, RunningGroup] = {}
        """Waiting to be trained. Both by number."""
        self._queue: deque[tuple[RunningGroup, int]] = deque()
        """Rollouts that have not started."""
        self._num_started = 0
        self._num_requeued = 0
        """Tasks of a resumed run whose rollouts were in flight."""
        self._counts = {"num_dropped_groups": 0, "num_overtaking_groups": 0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._progress = RolloutProgress()
        self._stack = contextlib.AsyncExitStack()
        self._watchdog: EventLoopWatchdog | None = None
        self._slots = asyncio.Semaphore(actors.max_concurrency)
        self._gate, self._queued, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._gate.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tunesmith-trainer", initializer=prepare_thread)

    @property
    def num_in_flight(self) -> int:
        """Groups that run, and complete ones that no step has taken."""
        return len(self._running) + len(self._complete)

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

    async def take(self, num_groups: int, *, step: int, progress: RolloutProgress | None = None) -> list[Group]:
        """Wait until this many groups are complete; returns those that were started first, in this order.

        `progress` collects the trajectories that finish in this step.
        """
        self._progress = RolloutProgress() if progress is None else progress
        await self._open()
        self._fill(self._limits.count_groups(num_groups, step=step))
        while len(self._complete) < num_groups and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
        taken = [self._complete.pop(number) for number in sorted(self._complete)[:num_groups]]
        self._feed.add_selected([group.index for group in taken])
        oldest = min((*self._running, *self._complete), default=self._num_started)
        self._counts["num_overtaking_groups"] += sum(group.number > oldest for group in taken)
        return [group.build() for group in taken]

    async def run_beside(self, work: Callable[[], T]) -> T:
        """Run an update or a save in a thread, while workflows go on; a cancellation waits for its end."""
        context = copy_context()
        running = asyncio.wrap_future(self._thread.submit(context.run, work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

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

    async def close(self) -> int:
        """Cancel everything in flight; returns the number of groups."""
        num_cancelled = self.num_in_flight
        for group in (*self._running.values(), *self._complete.values()):
            group.drop()
        self._running.clear()
        self._complete.clear()
        self._gate.set()
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._stack.aclose()
        self._thread.shutdown()
        return num_cancelled

    def compute_metrics(self) -> dict[str, float]:
        """Groups in flight now, and what happened since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0)
        numbers = counts | {
            "num_in_flight": self.num_in_flight,
            "num_waiting_groups": len(self._complete),
            "num_requeued_tasks": self._num_requeued,
        }
        self._num_requeued = 0
        return {f"staleness/{name}": float(number) for name, number in numbers.items()}

    def state_dict(self) -> dict[str, Any]:
        """The tasks in flight, which run again when the run is resumed; their rollouts are not saved."""
        groups = self._running | self._complete
        indices = [groups[number].index for number in sorted(groups)]
        return {"num_started": self._num_started, "tasks": indices + self._feed.requeued}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_started = state["num_started"]
        self._num_requeued = len(state["tasks"])
        self._feed.requeue(state["tasks"])

    async def _open(self) -> None:
        if self._watchdog is not None:
            return
        agent = self._actors.agent
        await self._stack.enter_async_context(serve_models(self._actors))
        watched = watch_event_loop(agent.logger, limit_s=min(BLOCKED_LIMIT_S, agent.timeout_s / 4))
        self._watchdog = self._stack.enter_context(watched)
        self._add_task(self._launch())

    def _fill(self, num_groups: int) -> None:
        """Put tasks in flight until there are this many."""
        for index in self._feed.draw(max(num_groups - self.num_in_flight, 0)):
            group = RunningGroup(
                number=self._num_started, index=index, task=self._feed.tasks[index], size=self._limits.group_size
            )
            self._num_started += 1
            self._running[group.number] = group
            self._queue += [(group, run_index) for run_index in range(group.size)]
        self._queued.set()

    def _drop_stale(self, policy_version: int) -> None:
        """Drop groups whose oldest token is older than a step of this version may train."""
        groups = self._running | self._complete
        for number in sorted(groups):
            oldest = groups[number].find_oldest_version()
            if oldest is not None and policy_version - oldest > self._limits.max_staleness:
                self._running.pop(number, None)
                self._complete.pop(number, None)
                groups[number].drop()
                self._feed.requeue([groups[number].index])
                self._counts["num_dropped_groups"] += 1

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
        """Start a task whose error `take` raises; that of a rollout holds a slot until it ends."""

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
            self._changed.set()

        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(note_end)
        return task

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
        self._progress.finished.append(trajectory)
        if group.is_complete:
            self._complete[group.number] = self._running.pop(group.number)
            self._changed.set()
        if self._progress.status is not None:
            self._progress.status.show_status(f"{len(self._complete)} groups complete of {self.num_in_flight}")


def describe_requeued(feed: TaskFeed, *, num_shown: int = 5) -> str | None:
    """The console line of a resumed run whose last checkpoint had rollouts in flight; None if it had none."""
    names = [feed.tasks[index].task_id for index in feed.requeued]
    if not names:
        return None
    return f"{len(names)} groups in flight were dropped; their tasks run again: {join_names(names, num_shown)}"


def join_names(names: Sequence[str], num_shown: int) -> str:
    rest = len(names) - num_shown
    return ", ".join(names[:num_shown]) + (f" and {rest} more" if rest > 0 else "")
