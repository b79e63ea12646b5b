"""A group of rollouts: what is asked for, and what is known of it while its rollouts run.

Seeds follow from the request alone, never from other rollouts, ranks or time. A request of step 3 of a run with seed 7,
for the second task of the step:

    GroupRequest(number=5, task=task, size=4, seed=(7, 3, 1))   rollout r: derive_seed(7, 3, 1, task.task_id, r)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from tunesmith.experience.replay import find_oldest_version
from tunesmith.rollout.recording.recorder import Session
from tunesmith.types import Group, Sampling, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A group to run."""

    number: int
    """Groups started before it in the run, or in the evaluation; no two have the same."""
    task: Task
    size: int
    """Number of rollouts."""
    seed: tuple[int | str, ...]
    """What the seeds of its rollouts are derived from, its index last: `(seed, step, index)` where a step waits for all
    of its groups, `(seed, "in flight", number)` where groups outlast a step."""
    sampling: Sampling | None = None
    """None: that of the run."""
    is_trained: bool = True
    """False: it is a baseline or an evaluation, whose rollouts never branch."""

    @property
    def index(self) -> int:
        """Its place among the groups that are started together: requests are served in this order."""
        assert isinstance(self.seed[-1], int)
        return self.seed[-1]


@dataclass(slots=True, kw_only=True, eq=False)
class RunningGroup:
    """A group whose rollouts have not all ended, or that no step has taken."""

    request: GroupRequest
    sessions: dict[int, Session] = field(default_factory=dict)
    """By `run_index`: the recorded calls of rollouts that have not ended."""
    ended: dict[int, Trajectory] = field(default_factory=dict)
    """By `run_index`."""
    task: asyncio.Task[None] | None = None

    def add(self, trajectory: Trajectory) -> None:
        self.ended[trajectory.run_index] = trajectory
        self.sessions.pop(trajectory.run_index, None)

    def find_oldest_version(self) -> int | None:
        """Policy version of the oldest token that may be trained; None: there is none yet.

        Tokens of failed rollouts are never trained.
        """
        scored = [run for run in self.ended.values() if run.reward is not None]
        versions = [find_oldest_version(scored), *(each.find_oldest_version() for each in self.sessions.values())]
        return min((version for version in versions if version is not None), default=None)

    def build(self) -> Group:
        runs = tuple(self.ended[index] for index in range(self.request.size))
        return Group(task=self.request.task, trajectories=runs)


def build_requests(
    tasks: Sequence[Task], *, size: int, seed: int, step: int = 0, sampling: Sampling | None = None
) -> list[GroupRequest]:
    """Requests of an evaluation for tasks that are started together, one for each."""
    return [
        GroupRequest(number=index, task=task, size=size, seed=(seed, step, index), sampling=sampling, is_trained=False)
        for index, task in enumerate(tasks)
    ]
