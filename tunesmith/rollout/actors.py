"""Actors: the loaded models together with the user's functions; they run tasks and return groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tunesmith.rollout.groups import attach_baselines, run_groups
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import ModelProvider, ModelService
from tunesmith.types import Engine, Group, Sampling, Task, Trajectory


class StatusLine(Protocol):
    """Shows progress."""

    def show_status(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """The loaded models together with the workflow and the judge."""

    engine: Engine
    """The sampler of the policy."""
    service: ModelService
    """Serves the policy to workflows."""
    model: ModelProvider | None = None
    """Binds models to the policy's rollouts; None: `service`."""
    auxiliary_models: Mapping[str, ModelProvider] = field(default_factory=dict)
    auxiliary_engines: Sequence[Engine] = ()
    """The engines of local auxiliary models, whose weights never change."""
    agent: Agent
    max_concurrency: int
    http_port: int | None = None
    """Port of the policy's HTTP server while workflows run; auxiliary models use free ports. None: in process only."""
    max_body_bytes: int = 8 * 2**20
    """Size limit of an HTTP request body."""


@dataclass(slots=True, kw_only=True)
class RolloutProgress:
    """Finished trajectories of one phase, shown on a status line."""

    status: StatusLine | None = None
    finished: list[Trajectory] = field(default_factory=list)
    """Without baseline rollouts."""
    num_done: int = 0

    def add(self, trajectory: Trajectory, *, num_expected: int, is_kept: bool) -> None:
        self.num_done += 1
        if is_kept:
            self.finished.append(trajectory)
        if self.status is not None:
            self.status.show_status(f"{self.num_done}/{num_expected} rollouts")


async def run_tasks(
    actors: Actors,
    tasks: Sequence[Task],
    *,
    group_size: int,
    seed: int,
    step: int,
    sampling: Sampling | None = None,
    baseline_sampling: Sampling | None = None,
    progress: RolloutProgress | None = None,
) -> list[Group]:
    """Run the agent `group_size` times on each task; returns groups in the order of the tasks.

    The policy's engine must be sampling. With `baseline_sampling`, one additional rollout of each task gives its
    group's baseline reward. `progress` collects finished trajectories, so that they can be saved if the phase is
    aborted.
    """
    for engine in actors.auxiliary_engines:
        engine.resume(0)  # an empty prefix cache makes a phase a function of its seed
    progress = RolloutProgress() if progress is None else progress
    num_expected = progress.num_done + len(tasks) * (group_size + (baseline_sampling is not None))
    async with AsyncExitStack() as serving:
        if actors.http_port is not None:
            local_services = [each for each in actors.auxiliary_models.values() if isinstance(each, ModelService)]
            ports = {actors.service: actors.http_port} | dict.fromkeys(local_services, 0)
            for service, port in ports.items():
                served = service.serve(port=port, max_body_bytes=actors.max_body_bytes)
                await serving.enter_async_context(served)
        run = partial(
            run_groups,
            tasks,
            agent=actors.agent,
            model=actors.model or actors.service,
            auxiliary_models=actors.auxiliary_models,
            step=step,
            max_concurrency=actors.max_concurrency,
        )
        groups = await run(
            group_size=group_size,
            seed=seed,
            sampling=sampling,
            on_progress=partial(progress.add, num_expected=num_expected, is_kept=True),
        )
        if baseline_sampling is None:
            return groups
        baselines = await run(
            group_size=1,
            seed=derive_seed(seed, "baseline"),
            sampling=baseline_sampling,
            on_progress=partial(progress.add, num_expected=num_expected, is_kept=False),
        )
        return attach_baselines(groups, baselines)
