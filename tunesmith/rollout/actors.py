"""Actors: the loaded models together with the user's functions; they run tasks and return groups."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from tunesmith.cluster.ranks import Ranks
from tunesmith.cluster.shared_counter import SharedCounters
from tunesmith.cluster.wait import end_together
from tunesmith.experience.path_cost import measure_group
from tunesmith.rollout.branching.tree import Branching
from tunesmith.rollout.groups import attach_baselines, run_groups
from tunesmith.rollout.rank_shares import RankLedger, RankShare, RolloutOrder, merge_rank_stats, outline_group
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import ModelProvider, ModelService
from tunesmith.rollout.task_source import PlannedTasks, TaskSource
from tunesmith.types import Engine, Group, Sampling, Task, Trajectory

T = TypeVar("T")


class StatusLine(Protocol):
    """Shows progress."""

    def show_status(self, text: str) -> None: ...


class RemoteRounds(Protocol):
    """Runs rounds of tasks on ranks that only sample."""

    @property
    def num_ranks(self) -> int: ...

    async def run_round(self, order: RolloutOrder, progress: RolloutProgress) -> list[Group]:
        """Run the tasks with the current weights; returns groups in the order of the tasks."""


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
    is_served_to_workers: bool = False
    """Whether programs outside of this process run the tasks, so that a rank answers them until all ranks are done."""
    ranks: Ranks = field(default_factory=Ranks)
    """The ranks that share the tasks."""
    counters: SharedCounters | None = None
    """Hand out tasks on demand on several ranks; None: by plan."""
    has_one_sampler: bool = False
    """Whether only the first rank has a sampler of the policy and runs tasks."""
    ledger: RankLedger = field(default_factory=RankLedger)
    """Where the groups of the current step were run."""
    remote: RemoteRounds | None = None
    """The ranks that only sample, on the first rank; None if there are none."""

    @property
    def num_samplers(self) -> int:
        """Number of ranks that run tasks."""
        if self.remote is not None:
            return self.remote.num_ranks
        return 1 if self.has_one_sampler else self.ranks.world_size

    def compute_engine_stats(self) -> dict[str, float]:
        """Counters of all ranks' engines since the last call; times are means over ranks."""
        own = self.engine.compute_stats()
        return merge_rank_stats([own, *self.ledger.take_engine_stats()], self.num_samplers)

    def compute_recorder_stats(self) -> dict[str, float]:
        """Counters of all ranks' recorders since the last call."""
        own = self.service.recorder.compute_stats()
        return merge_rank_stats([own, *self.ledger.take_recorder_stats()], self.num_samplers)


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
    branching: Branching | None = None,
    has_tokens: bool = True,
) -> list[Group]:
    """Run the agent `group_size` times on each task; returns groups in the order of the tasks.

    The policy's engine must be sampling. With `baseline_sampling`, one additional rollout of each task gives its
    group's baseline reward. With `branching`, rollouts of a group branch. `progress` collects finished trajectories, so
    that they can be saved if the phase is aborted. On several ranks the first calls this, and the others run
    `run_share` with the order that it sends. Without `has_tokens`, turns of other ranks' groups have no tokens, until
    these groups are collected (`shared_step`).
    """
    order = RolloutOrder(
        tasks=tasks,
        group_size=group_size,
        seed=seed,
        step=step,
        sampling=sampling,
        baseline_sampling=baseline_sampling,
        policy_version=actors.engine.policy_version,
        number=actors.ledger.num_rounds,
        has_branches=branching is not None,
        has_one_sampler=actors.has_one_sampler,
        has_tokens=has_tokens,
    )
    progress = RolloutProgress() if progress is None else progress
    if actors.remote is not None:
        return await actors.remote.run_round(order, progress)
    if actors.ranks.is_alone:
        source = order.build_source(actors.ranks, None)
        return await run_own_tasks(actors, order, source, progress, branching)
    started = time.perf_counter()
    actors.ranks.broadcast_object(order)
    shares = await run_share(actors, order, progress, branching)
    assert shares is not None, "only the first rank starts a round"
    actors.ledger.exchange_s += time.perf_counter() - started - max(share.rollout_s for share in shares)
    progress.finished += [run for share in shares[1:] for group in share.groups for run in group.trajectories]
    for share in shares[1:]:
        if branching is not None and share.branching is not None:
            branching.stats.add(share.branching)
    return actors.ledger.add_round(order, [share.build_groups(tasks) for share in shares])


async def run_share(
    actors: Actors,
    order: RolloutOrder,
    progress: RolloutProgress | None = None,
    branching: Branching | None = None,
) -> list[RankShare] | None:
    """Run this rank's tasks of a round; returns the shares of all ranks on the first rank, None on the others.

    `branching`: how rollouts branch if the order says that they do.
    """
    branching = branching if order.has_branches else None
    source = order.build_source(actors.ranks, actors.counters)
    running = measure_time(run_own_tasks(actors, order, source, progress or RolloutProgress(), branching))
    groups, rollout_s = await (end_together(actors.ranks, running) if actors.is_served_to_workers else running)
    actors.ledger.keep(order, source.taken, groups)
    if not order.has_tokens:
        actors.ledger.outlined |= {(order.number, position) for position in source.taken}
    is_first = actors.ranks.is_first
    return actors.ranks.gather_objects(
        RankShare(
            groups=groups if order.has_tokens and not is_first else [],
            outlines=[] if order.has_tokens or is_first else [outline_group(group) for group in groups],
            positions=source.taken,
            costs=[measure_group(group) for group in groups],
            engine_stats={} if is_first else actors.engine.compute_stats(),
            recorder_stats={} if is_first else actors.service.recorder.compute_stats(),
            rollout_s=rollout_s,
            branching=None if is_first or branching is None else branching.stats.take(),
        )
    )


async def measure_time(work: Awaitable[T]) -> tuple[T, float]:
    """The result, and the seconds that it took."""
    started = time.perf_counter()
    return await work, time.perf_counter() - started


async def run_own_tasks(
    actors: Actors,
    order: RolloutOrder,
    source: TaskSource,
    progress: RolloutProgress,
    branching: Branching | None = None,
) -> list[Group]:
    """Run the tasks of the round that the source hands out in this process."""
    for engine in actors.auxiliary_engines:
        engine.resume(0)  # an empty prefix cache makes a phase a function of its seed
    num_tasks = -(-len(order.tasks) // actors.num_samplers)
    num_expected = progress.num_done + num_tasks * (order.group_size + (order.baseline_sampling is not None))
    async with serve_models(actors):
        run = partial(
            run_groups,
            order.tasks,
            agent=actors.agent,
            model=actors.model or actors.service,
            auxiliary_models=actors.auxiliary_models,
            step=order.step,
            max_concurrency=actors.max_concurrency,
        )
        groups = await run(
            source=source,
            group_size=order.group_size,
            seed=order.seed,
            sampling=order.sampling,
            on_progress=partial(progress.add, num_expected=num_expected, is_kept=True),
            branching=branching,
        )
        if order.baseline_sampling is None:
            return groups
        baselines = await run(
            source=PlannedTasks(source.taken),
            group_size=1,
            seed=derive_seed(order.seed, "baseline"),
            sampling=order.baseline_sampling,
            on_progress=partial(progress.add, num_expected=num_expected, is_kept=False),
        )
        return attach_baselines(groups, baselines)


@asynccontextmanager
async def serve_models(actors: Actors) -> AsyncIterator[None]:
    """Serve the models over HTTP, if the run does and they are not served already."""
    async with AsyncExitStack() as serving:
        if actors.http_port is not None and not actors.service.is_served:
            local_services = [each for each in actors.auxiliary_models.values() if isinstance(each, ModelService)]
            ports = {actors.service: actors.http_port} | dict.fromkeys(local_services, 0)
            for service, port in ports.items():
                served = service.serve(port=port, max_body_bytes=actors.max_body_bytes)
                await serving.enter_async_context(served)
        yield
