"""A group while its rollouts run: what has ended, what still samples, and the age of its oldest token."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tunesmith.experience.staleness import find_oldest_version
from tunesmith.rollout.recording.recorder import Session
from tunesmith.rollout.service import BoundModel, ModelProvider
from tunesmith.types import Group, Sampling, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedGroup:
    """A group that is put in flight."""

    number: int
    """Groups started before it in the whole run: seeds and the order of requests follow from it."""
    task: Task


@dataclass(slots=True, kw_only=True, eq=False)
class RunningGroup:
    """The rollouts of one task that is in flight."""

    number: int
    """As in `StartedGroup`."""
    task: Task
    size: int
    sessions: dict[int, Session] = field(default_factory=dict)
    """By `run_index`: the recorded calls of rollouts that have not ended."""
    finished: dict[int, Trajectory] = field(default_factory=dict)
    """By `run_index`."""
    runs: list[asyncio.Task[None]] = field(default_factory=list)
    is_dropped: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.size

    def add(self, run_index: int, trajectory: Trajectory) -> None:
        self.finished[run_index] = trajectory
        self.sessions.pop(run_index, None)

    def find_oldest_version(self) -> int | None:
        """Policy version of the oldest token that may be trained; None: there is none yet.

        Tokens of failed rollouts are never trained.
        """
        scored = [run for run in self.finished.values() if run.reward is not None]
        versions = [find_oldest_version(scored), *(each.find_oldest_version() for each in self.sessions.values())]
        return min((version for version in versions if version is not None), default=None)

    def drop(self) -> None:
        """Cancel the rollouts; those that have not started never do."""
        self.is_dropped = True
        for run in self.runs:
            run.cancel()

    def build(self) -> Group:
        return Group(task=self.task, trajectories=tuple(self.finished[index] for index in range(self.size)))


class WatchedModel:
    """Binds models to one rollout of a group, whose session the group then knows."""

    def __init__(
        self, source: ModelProvider, group: RunningGroup, run_index: int, *, gate: asyncio.Event, keeps_cache: bool
    ) -> None:
        """Calls wait while the gate is not set; `keeps_cache`: as `rollout.stale_cache=keep`."""
        self._source = source
        self._group = group
        self._run_index = run_index
        self._gate = gate
        self._keeps_cache = keeps_cache

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        bound = self._source.open(seed=seed, order=order, sampling=sampling)
        session = bound.session
        assert isinstance(session, Session), "the run file was checked: workflows run in this process"
        session.gate, session.keeps_cache = self._gate, self._keeps_cache
        self._group.sessions[self._run_index] = session
        return bound

    def close(self, bound: BoundModel) -> tuple[Turn, ...]:
        return self._source.close(bound)
