"""Who does what in a run: the dispatcher and the trainer of the first rank, and what the other ranks follow.

The first rank sends each of the others messages over a link. A rank that trains and samples follows those of the
dispatcher (`rollout/workers/rank.py`) and of the trainer (`trainer/rank_trainer.py`); one that only samples, or that
only trains, follows its half. The last message is `RunEnd`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.own_functions import OwnFunctions
from tunesmith.cluster.links import NO_LINKS, Links, connect_links
from tunesmith.cluster.process_group import RankRoles
from tunesmith.cluster.ranks import Ranks
from tunesmith.cluster.work_thread import NoThread, WorkThread
from tunesmith.config import RunConfig
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import open_windows
from tunesmith.errors import RankError
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.branching.tree import Branching
from tunesmith.rollout.dispatcher import Dispatcher, DispatchPlan
from tunesmith.rollout.workers.local import GatherWeights, LocalWorker
from tunesmith.rollout.workers.rank import RankWorker, ServedWorker
from tunesmith.rollout.workers.worker import Worker
from tunesmith.runs.extra_models import load_extra_models
from tunesmith.runs.policy import Policy, build_sampling
from tunesmith.tasks.task_feed import TaskFeed
from tunesmith.trainer.optimizer import find_trainable
from tunesmith.trainer.rank_trainer import RankTrainer, SaveState, Update
from tunesmith.trainer.sharding.sharded_model import iter_whole_weights
from tunesmith.trainer.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The run has ended with this result."""

    result: Any


def connect_ranks(config: RunConfig, roles: RankRoles) -> Links:
    """The links of this rank; all ranks call this."""
    if roles.world.is_alone:
        return NO_LINKS
    return connect_links(roles.world, range(1, roles.world.world_size), timeout_s=config.cluster.timeout_s)


def build_thread(config: RunConfig, policy: Policy) -> WorkThread | NoThread:
    """Where updates and saves are done: beside the event loop if rollouts continue meanwhile."""
    if config.rollout.max_staleness == 0:
        return NoThread()
    device = policy.model.device
    return WorkThread(partial(torch.cuda.set_device, device)) if device.type == "cuda" else WorkThread()


def build_branching(config: RunConfig, policy: Policy) -> Branching | None:
    if config.rollout.branching is None:
        return None
    vocab_size = policy.model.get_input_embeddings().num_embeddings
    return Branching(section=config.rollout.branching, vocab_size=vocab_size)


def build_dispatcher(
    config: RunConfig,
    feed: TaskFeed,
    policy: Policy,
    actors: Actors,
    roles: RankRoles,
    links: Links,
    thread: WorkThread | NoThread,
    *,
    total_steps: int,
    has_baselines: bool = False,
) -> Dispatcher:
    """The dispatcher of a run, on the first rank; `has_baselines`: whether the algorithm needs them."""
    branching, max_staleness = build_branching(config, policy), config.rollout.max_staleness
    plan = DispatchPlan(
        seed=config.seed,
        group_size=config.algorithm.group_size,
        batch_size=config.algorithm.batch_size,
        total_steps=total_steps,
        max_staleness=max_staleness,
        baseline_sampling=build_sampling(config.model, temperature=0.0) if has_baselines else None,
        branching=branching,
        is_balanced=config.rollout.assignment == "balanced",
        max_concurrency=config.rollout.max_concurrency,
    )
    workers: list[Worker]
    if roles.samplers:
        weights = list(find_trainable(policy.model).values())
        num_weights = sum(each.numel() for each in weights)
        workers = [
            RankWorker(links.by_rank[rank], rank, num_weights=num_weights, max_staleness=max_staleness)
            for rank in roles.samplers
        ]
        send_weights = partial(roles.send_weights, weights)
        return Dispatcher(workers, feed, plan, send_weights=send_weights, thread=thread)
    others, has_phases = links.by_rank.items(), max_staleness > 0
    has_shards = config.cluster.has_sharded_weights and not roles.trainers.is_alone
    workers = [build_worker(config, policy, actors, roles, branching, links if has_shards else None)]
    if not has_shards:
        has_windows = has_phases and policy.model.device.type == "cpu"
        workers += [
            RankWorker(link, rank, has_phases=has_phases, has_windows=has_windows, branching=branching)
            for rank, link in others
        ]
    return Dispatcher(workers, feed, plan, thread=thread)


def build_worker(
    config: RunConfig,
    policy: Policy,
    actors: Actors,
    roles: RankRoles,
    branching: Branching | None = None,
    shard_links: Links | None = None,
) -> LocalWorker:
    """The worker of this rank; `shard_links`: to the ranks whose shards of the weights its engine gathers."""
    max_staleness = config.rollout.max_staleness
    engines = [each for each in (actors.engine, *actors.auxiliary_engines) if isinstance(each, LocalEngine)]
    is_shared = max_staleness > 0 and not roles.samplers and not roles.world.is_alone
    has_windows = policy.model.device.type == "cpu"
    return LocalWorker(
        actors,
        branching=branching,
        max_staleness=max_staleness,
        keeps_cache=max_staleness > 0 and config.rollout.stale_cache == "keep",
        open_windows=partial(open_windows, engines=engines, has_windows=has_windows) if is_shared else None,
        shard_links=[] if shard_links is None else list(shard_links.by_rank.values()),
    )


def build_served_worker(
    config: RunConfig,
    policy: Policy,
    actors: Actors,
    roles: RankRoles,
    links: Links,
    thread: WorkThread | NoThread,
    *,
    sends_tokens: bool,
) -> ServedWorker:
    """The worker of a rank other than the first. One that only samples sends all tokens."""
    branching = build_branching(config, policy)
    weights = list(find_trainable(policy.model).values())
    num_weights = sum(each.numel() for each in weights)

    def take_weights(expected: int) -> None:
        if expected != num_weights:
            raise RankError(f"this rank has {num_weights} weights to overwrite, and the first one sends {expected}")
        roles.send_weights(weights)

    return ServedWorker(
        build_worker(config, policy, actors, roles, branching),
        links.first,
        sends_tokens=sends_tokens or roles.is_sampler,
        branching=branching,
        take_weights=take_weights if roles.is_sampler else None,
        thread=thread,
    )


def build_trainer(
    config: RunConfig, algorithm: Algorithm, functions: OwnFunctions, policy: Policy, ranks: Ranks, *, total_steps: int
) -> Trainer:
    """The trainer of the policy's own weights, with the extra models of the algorithm."""
    extra = load_extra_models(algorithm, config.algorithm, config.model, policy=policy.model)
    return Trainer(
        policy.model,
        config.trainer,
        config.algorithm,
        max_model_len=config.model.max_model_len,
        num_total_steps=total_steps,
        reference_model=extra.reference,
        teacher_model=extra.teacher,
        critic_model=extra.critic,
        has_separate_sampler=config.engine.has_separate_sampler,
        own_functions=functions,
        grammars=policy.engine.grammars,
        ranks=ranks,
        has_sharded_gradients=config.cluster.has_sharded_gradients,
    )


def build_rank_trainer(
    config: RunConfig,
    trainer: Trainer,
    ranks: Ranks,
    links: Links,
    thread: WorkThread | NoThread,
    worker: ServedWorker | None = None,
) -> RankTrainer:
    """The trainer of this rank as part of all `ranks` that train; `worker`: that of a rank other than the first."""
    branching = config.rollout.branching
    return RankTrainer(
        trainer=trainer,
        ranks=ranks,
        links=[links.by_rank[rank] for rank in range(1, ranks.world_size)] if ranks.is_first else [],
        kept={} if worker is None else worker.kept,
        thread=thread,
        has_hard_credit=branching is not None and branching.credit == "hard",
    )


async def lead(
    training: Callable[[], Awaitable[T]], dispatcher: Dispatcher, links: Links, show_line: Callable[[str], None]
) -> T:
    """Run the training on the first rank, cancel what is in flight, and let the other ranks end."""
    try:
        for link in links.by_rank.values():
            await link.open()
        try:
            result = await training()
        finally:
            if num_cancelled := await dispatcher.close():
                show_line(f"{num_cancelled} groups in flight were cancelled; a resumed run starts their tasks again")
        for link in links.by_rank.values():
            link.send(RunEnd(result=result))
        return result
    finally:
        for link in links.by_rank.values():
            await link.close()


async def follow(
    links: Links, worker: ServedWorker | None, trainer: RankTrainer | None, thread: WorkThread | NoThread
) -> Any:
    """Carry out the messages of the first rank until the run ends; returns its result."""
    await links.first.open()
    try:
        if worker is not None:
            await worker.open()
        while not isinstance(message := await (links.first if worker is None else worker).receive(), RunEnd):
            match message:
                case Update() | SaveState() if trainer is not None:
                    await trainer.follow(message)
                case GatherWeights() if trainer is not None:
                    for _ in iter_whole_weights(trainer.trainer.model):
                        pass
                case _:
                    assert worker is not None, f"{type(message).__name__} is for a worker"
                    await worker.follow(message)
        return message.result
    finally:
        if worker is not None:
            await worker.close()
        await links.first.close()
        thread.close()
