"""Who does what in a run: the dispatcher and the trainer of the first rank, and what the other ranks follow.

The first rank sends each of the others messages over a link. A rank that trains and samples follows those of the
dispatcher (`rollout/workers/rank.py`) and of the trainer (`trainer/rank_trainer.py`); one that only samples, or that
only trains, follows its half. The last message is `RunEnd`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.cluster.links import NO_LINKS, Link, Links, connect_links
from tunesmith.cluster.process_group import RankRoles
from tunesmith.cluster.work_thread import NoThread, WorkThread
from tunesmith.config import RunConfig
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import LoopWindows
from tunesmith.engine.event_loop.signal_handlers import raise_signal
from tunesmith.errors import RankError
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.branching.tree import Branching
from tunesmith.rollout.dispatcher import Dispatcher, DispatchPlan
from tunesmith.rollout.service import ModelProvider, ModelService
from tunesmith.rollout.workers.local import GatherWeights, LocalWorker
from tunesmith.rollout.workers.rank import RankWorker, ServedWorker
from tunesmith.rollout.workers.worker import Worker
from tunesmith.runs.extra_models import load_extra_models
from tunesmith.runs.policy import Policy, build_sampling
from tunesmith.tasks.selector import TaskFeed
from tunesmith.trainer.optimizer import find_trainable
from tunesmith.trainer.rank_trainer import RankTrainer, SaveState, Update
from tunesmith.trainer.sharding.sharded_model import iter_whole_weights
from tunesmith.trainer.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Lets programs outside of this process take the place of the workflow."""

    start: Callable[..., AbstractAsyncContextManager[str]]
    """`start(service, rank=..., links=...)` serves the policy of a rank and yields the URL."""
    model: ModelProvider | None = None
    """What binds models to rollouts, if it is not the service."""
    notice: str
    """The console line, with `{url}` in place of the URL."""


async def work_while_serving(
    work: Callable[[], Awaitable[T]],
    server: Server | None,
    service: ModelService,
    links: Links,
    *,
    rank: int = 0,
    show_line: Callable[[str], None] | None = None,
) -> T:
    """Do the work while the server runs, if there is one, with links of its own; `show_line` gets its notice."""
    if server is None:
        return await work()
    async with server.start(service, rank=rank, links=links) as url:
        if show_line is not None:
            show_line(server.notice.format(url=url))
        return await work()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The run has ended with this result, on a signal or by itself."""

    result: Any
    signal_number: int | None = None

    def take_result(self) -> Any:
        """The result; raises KeyboardInterrupt or SystemExit if a signal ended the run."""
        raise_signal(self.signal_number)
        return self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What one rank of a run works with, and what it builds of that."""

    config: RunConfig
    """The config with this rank's device and port."""
    roles: RankRoles
    policy: Policy
    actors: Actors
    links: Links
    thread: WorkThread | NoThread
    """Where updates and saves are done: beside the event loop if rollouts continue meanwhile."""

    def build_dispatcher(self, feed: TaskFeed, *, total_steps: int, has_baselines: bool = False) -> Dispatcher:
        """The dispatcher of a run, on the first rank; `has_baselines`: whether the algorithm needs them."""
        config, roles, links, max_staleness = self.config, self.roles, self.links, self.config.rollout.max_staleness
        plan = DispatchPlan(
            seed=config.seed,
            group_size=config.algorithm.group_size,
            batch_size=config.algorithm.batch_size,
            total_steps=total_steps,
            max_staleness=max_staleness,
            baseline_sampling=build_sampling(config.model, temperature=0.0) if has_baselines else None,
            is_balanced=config.rollout.assignment == "balanced",
            max_concurrency=config.rollout.max_concurrency,
        )
        workers: list[Worker]
        if roles.samplers:
            weights = list(find_trainable(self.policy.model).values())
            num_weights = sum(each.numel() for each in weights)
            workers = [
                RankWorker(links[rank], rank, num_weights=num_weights, max_staleness=max_staleness)
                for rank in roles.samplers
            ]
            send_weights = partial(self.thread.run, partial(roles.send_weights, weights))
            return Dispatcher(workers, feed, plan, send_weights=send_weights)
        has_phases = max_staleness > 0
        has_shards = config.cluster.has_sharded_weights and not roles.trainers.is_alone
        workers = [self.build_worker(shard_links=list(links.values()) if has_shards else [])]
        if not has_shards:
            has_windows = has_phases and self.policy.model.device.type == "cpu"
            workers += [
                RankWorker(link, rank, has_phases=has_phases, has_windows=has_windows) for rank, link in links.items()
            ]
        return Dispatcher(workers, feed, plan)

    def build_worker(self, *, shard_links: Sequence[Link] = ()) -> LocalWorker:
        """The worker of this rank; `shard_links`: to the ranks whose shards of the weights its engine gathers."""
        rollout, roles, actors = self.config.rollout, self.roles, self.actors
        engines = [each for each in (actors.engine, *actors.auxiliary_engines) if isinstance(each, LocalEngine)]
        is_shared = rollout.max_staleness > 0 and not roles.samplers and not roles.world.is_alone
        has_windows = self.policy.model.device.type == "cpu"
        return LocalWorker(
            actors,
            max_staleness=rollout.max_staleness,
            keeps_cache=rollout.max_staleness > 0 and rollout.stale_cache == "keep",
            open_windows=partial(LoopWindows, engines=engines, has_windows=has_windows) if is_shared else None,
            shard_links=shard_links,
        )

    def build_served_worker(self, *, sends_tokens: bool) -> ServedWorker:
        """The worker of a rank other than the first. One that only samples sends all tokens."""
        weights = list(find_trainable(self.policy.model).values())
        num_weights = sum(each.numel() for each in weights)

        async def take_weights(expected: int) -> None:
            if expected != num_weights:
                raise RankError(f"this rank has {num_weights} weights to overwrite, and the first one sends {expected}")
            await self.thread.run(partial(self.roles.send_weights, weights))

        return ServedWorker(
            self.build_worker(),
            self.links[0],
            sends_tokens=sends_tokens or self.roles.is_sampler,
            take_weights=take_weights if self.roles.is_sampler else None,
        )

    def build_trainer(self, algorithm: Algorithm, *, total_steps: int) -> Trainer:
        """The trainer of the policy's own weights, with the extra models of the algorithm."""
        config, policy = self.config, self.policy
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
            resolved=algorithm,
            grammars=policy.engine.grammars,
            ranks=self.roles.trainers,
            has_sharded_gradients=config.cluster.has_sharded_gradients,
        )

    def join_trainer(self, trainer: Trainer, worker: ServedWorker | None = None) -> RankTrainer:
        """The trainer as part of all ranks that train; `worker`: that of a rank other than the first."""
        ranks, branching = self.roles.trainers, self.config.rollout.branching
        return RankTrainer(
            trainer=trainer,
            ranks=ranks,
            links=[self.links[rank] for rank in range(1, ranks.world_size)] if ranks.is_first else [],
            kept={} if worker is None else worker.kept,
            thread=self.thread,
            has_hard_credit=branching is not None and branching.credit == "hard",
        )


def build_rank(config: RunConfig, roles: RankRoles, policy: Policy, actors: Actors, links: Links) -> Rank:
    """This rank of a run whose models are loaded."""
    if config.trainer.routing_replay and isinstance(policy.engine, LocalEngine):
        policy.engine.record_routes()
    if (section := config.rollout.branching) is not None:
        vocab_size = len(policy.model.get_input_embeddings().weight)
        actors = replace(actors, branching=Branching(section=section, vocab_size=vocab_size))
    thread: WorkThread | NoThread = NoThread()
    if config.rollout.max_staleness > 0:
        device = policy.model.device
        thread = WorkThread(partial(torch.cuda.set_device, device)) if device.type == "cuda" else WorkThread()
    return Rank(config=config, roles=roles, policy=policy, actors=actors, thread=thread, links=links)


def join_ranks(
    config: RunConfig, roles: RankRoles, policy: Policy, actors: Actors, server: Server | None
) -> tuple[Rank, Links]:
    """This rank, connected to the others, and the links of its server; all ranks call this."""
    links = connect_links(roles.world, timeout_s=config.cluster.timeout_s)
    server_links = NO_LINKS if server is None else connect_links(roles.world, timeout_s=config.cluster.timeout_s)
    if server is not None and server.model is not None:
        actors = replace(actors, model=server.model)
    return build_rank(config, roles, policy, actors, links), server_links


async def lead(
    training: Callable[[], Awaitable[RunEnd]], dispatcher: Dispatcher, links: Links, show_line: Callable[[str], None]
) -> RunEnd:
    """Run the training on the first rank, cancel what is in flight, and let the other ranks end."""
    try:
        for link in links.values():
            await link.open()
        try:
            end = await training()
        finally:
            if num_cancelled := await dispatcher.close():
                show_line(f"{num_cancelled} groups in flight were cancelled; a resumed run starts their tasks again")
        for link in links.values():
            link.send(end)
        return end
    finally:
        for link in links.values():
            await link.close()


async def follow(rank: Rank, worker: ServedWorker | None, trainer: RankTrainer | None) -> RunEnd:
    """Carry out the messages of the first rank until the run ends."""
    first = rank.links[0]
    await first.open()
    try:
        if worker is not None:
            await worker.open()
        while not isinstance(message := await (first if worker is None else worker).receive(), RunEnd):
            match message:
                case Update() | SaveState() if trainer is not None:
                    await trainer.follow(message)
                case GatherWeights() if trainer is not None:
                    for _ in iter_whole_weights(trainer.trainer.model):
                        pass
                case _:
                    assert worker is not None, f"{type(message).__name__} is for a worker"
                    await worker.follow(message)
        return message
    finally:
        if worker is not None:
            await worker.close()
        await first.close()
        rank.thread.close()
