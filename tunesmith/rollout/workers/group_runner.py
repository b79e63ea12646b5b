"""Runs groups on the running event loop: at most `max_concurrency` rollouts at a time, in the order of their start.

A rollout has one permit while its workflow and judge run. Each has its own seed, so what it samples does not depend on
timing. A rollout that fails stays in its group without a reward; an error of ours ends all groups.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Self

from tunesmith.errors import RolloutError
from tunesmith.experience.finished_group import drop_routes
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.branching.tree import GroupTrees
from tunesmith.rollout.cancellation import cancel_all, gather_all
from tunesmith.rollout.group import GroupRequest, RunningGroup
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.rollout.recording.recorder import Session
from tunesmith.rollout.recording.replay import RolloutRecord
from tunesmith.rollout.runner import run_trajectory
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import RecordedCalls
from tunesmith.rollout.watchdog import BLOCKED_LIMIT_S, EventLoopWatchdog
from tunesmith.types import Group, Trajectory


class GroupRunner:
    """The groups that run, and those that have finished and that nobody has taken; a context that ends them."""

    def __init__(self, actors: Actors, *, keeps_cache: bool = False, progress: RolloutProgress | None = None) -> None:
        """`keeps_cache`: as `rollout.stale_cache=keep`."""
        self._actors = actors
        self._keeps_cache = keeps_cache
        self._permits = asyncio.Semaphore(actors.max_concurrency)
        self.progress = progress or RolloutProgress()
        self.running: dict[int, RunningGroup] = {}
        self.finished: dict[int, RunningGroup] = {}
        """Both by number."""
        self.gate = asyncio.Event()
        """Model calls wait while it is not set; tools do not."""
        self.gate.set()
        self.on_change: Callable[[], None] = lambda: None
        """Called when a group has finished, or an error has occurred."""
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = contextlib.ExitStack()
        agent = actors.agent
        self.watchdog = EventLoopWatchdog(agent.logger, min(BLOCKED_LIMIT_S, agent.timeout_s / 4))

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self.watchdog.watching())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.running.clear()
        self.finished.clear()
        self.gate.set()
        with self._stack:
            await cancel_all(self._tasks)

    def start(self, requests: Sequence[GroupRequest]) -> None:
        """Run these groups after those that were started before."""
        for request in requests:
            group = self.running[request.number] = RunningGroup(request=request)
            group.task = asyncio.create_task(self._run_group(group))
            self._tasks.add(group.task)
            group.task.add_done_callback(partial(self._note_end, group))

    async def run_all(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Run groups to their end; returns them in the order of the requests."""
        self.start(requests)
        while self.running and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        self.raise_error()
        return [self.finished.pop(request.number).build() for request in requests]

    def drop_stale(self, policy_version: int, *, max_staleness: int) -> list[int]:
        """Cancel and forget groups that a step of this version may no longer train; returns their numbers."""
        groups = self.running | self.finished
        oldest_of = {number: group.find_oldest_version() for number, group in groups.items()}
        dropped = list_stale(oldest_of, policy_version, max_staleness)
        for number in dropped:
            self.running.pop(number, None)
            self.finished.pop(number, None)
            task = groups[number].task
            assert task is not None
            task.cancel()
        return dropped

    def raise_error(self) -> None:
        """Raise the error of a rollout that was not user code's."""
        if self._error is not None:
            raise self._error

    async def _run_group(self, group: RunningGroup) -> None:
        request, branching = group.request, self._actors.branching
        if request.is_trained and branching is not None:
            run = partial(self._run_rollout, group)
            seed = derive_seed(derive_seed(*request.seed[:-1], "branching"), request.index, request.task.task_id)
            await GroupTrees(branching, group_size=request.size, seed=seed, run=run).run()
            return
        await gather_all(self._run_rollout(group, run_index) for run_index in range(request.size))

    async def _run_rollout(
        self, group: RunningGroup, run_index: int, record: RolloutRecord | None = None
    ) -> Trajectory:
        request = group.request

        def prepare(session: RecordedCalls) -> None:
            session.record = record
            if isinstance(session, Session):
                session.keeps_cache = self._keeps_cache
                group.sessions[run_index] = session

        # the permit covers the judge too, which may call models or tools of its own
        async with self._permits:
            trajectory = await run_trajectory(
                request.task,
                run_index,
                agent=self._actors.agent,
                model=self._actors.model,
                auxiliary_models=self._actors.auxiliary_models,
                seed=derive_seed(*request.seed, request.task.task_id, run_index),
                order=(request.index, run_index),
                sampling=request.sampling,
                watchdog=self.watchdog,
                prepare=prepare,
                gate=self.gate,
            )
        trajectory = trajectory if request.is_trained else drop_routes(trajectory)
        group.add(trajectory)
        self.progress.add([trajectory], is_kept=request.is_trained)
        return trajectory

    def _note_end(self, group: RunningGroup, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self.running.get(group.request.number) is not group:
            return  # dropped, or the runner has ended
        del self.running[group.request.number]
        if task.cancelled():
            self._error = RolloutError("user code cancelled a rollout: cancel only tasks that it made itself")
        elif task.exception() is not None:
            self._error = task.exception()
        else:
            self.finished[group.request.number] = group
        self._changed.set()
        self.on_change()


def list_stale(oldest_of: Mapping[int, int | None], policy_version: int, max_staleness: int) -> list[int]:
    """Numbers of the groups that are too old for a step of this version; `oldest_of`: version of a group's oldest
    token, by its number."""
    ages = {number: policy_version - oldest for number, oldest in oldest_of.items() if oldest is not None}
    return sorted(number for number, age in ages.items() if age > max_staleness)
