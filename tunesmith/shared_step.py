"""Steps on several ranks: the first rank leads, the others follow its orders.

The first rank selects tasks, computes advantages, writes files and decides what comes next. Whenever all ranks must
take part (in a round of rollouts, in an update, in gathering the optimizer's state) it broadcasts an order, which
`follow` carries out on the others. A group is trained where it was run unless another rank has less work. Where
advantages follow from rewards, the first rank has only outlines of the others' groups before the update, and collects
the groups while the devices work on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.cluster.balance import balance_work
from tunesmith.cluster.ranks import Ranks
from tunesmith.errors import RolloutError
from tunesmith.experience.batch import Batch
from tunesmith.experience.path_cost import measure_group
from tunesmith.experience.samples import add_experts, build_samples
from tunesmith.rollout.actors import Actors, RolloutProgress, run_share
from tunesmith.rollout.branching.tree import Branching
from tunesmith.rollout.groups import check_failures
from tunesmith.rollout.in_flight.rank_groups import GroupOrder, RankMember
from tunesmith.rollout.rank_shares import RolloutOrder
from tunesmith.trainer.packing import combine_cost
from tunesmith.trainer.sharding.sharded_model import find_sharding, gather_state, iter_whole_weights
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Group, RunAdvantage, Sample

T = TypeVar("T")
Order = Literal["train", "collect", "state", "weights"]
"""What the first rank asks for, besides a `RolloutOrder` and the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The last order."""

    result: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShare:
    """A group that a rank trains."""

    group: Group | None
    """None: the rank has it under `key`, because it has run it or because it is moved there."""
    key: tuple[int, int] | None
    place: tuple[int, int]
    """Index of the group in the batch, and of its first trajectory."""
    advantages: Sequence[RunAdvantage]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainShare:
    """What a rank trains in a step."""

    groups: Sequence[GroupShare]
    experts: Sequence[Sample]
    """Demonstrations, with their indices in the batch."""
    policy_version: int
    has_hard_credit: bool = False
    moved: Sequence[tuple[int, int]] = ()
    """Keys of the groups that go from the ranks that have run them to others, not by the first rank."""
    has_outlines: bool = False
    """Whether the first rank has outlines, and collects the groups during the update."""


def train_groups(
    actors: Actors,
    trainer: Trainer,
    groups: Sequence[Group],
    advantages: Sequence[Sequence[RunAdvantage]],
    experts: Sequence[Sample],
    *,
    policy_version: int,
    has_hard_credit: bool = False,
    beside: Sequence[Callable[[], None]] = (),
) -> dict[str, float]:
    """Train the groups and demonstrations of a step on all ranks; metrics of the samples and of the trainer.

    On several ranks only the first calls this. `has_hard_credit`: as `rollout.branching.credit: hard`. `beside` are
    pieces of work of the host, done while the device computes; groups of other ranks have been collected by then.
    """
    if actors.ranks.is_alone:
        samples, metrics = build_samples(groups, advantages, has_hard_credit=has_hard_credit)
        return metrics | trainer.step(add_experts(samples, experts), policy_version=policy_version, beside=beside)
    shares, metrics = share_groups(actors, trainer, groups, advantages)
    moved = find_moved(actors, groups, shares)
    split = split_experts(
        experts,
        len(shares),
        first_group=len(groups),
        first_trajectory=sum(len(group.trajectories) for group in groups),
    )
    started = time.perf_counter()
    actors.ranks.broadcast_object("train")
    share = actors.ranks.scatter_objects(
        [
            TrainShare(
                groups=own,
                experts=demonstrations,
                policy_version=policy_version,
                has_hard_credit=has_hard_credit,
                moved=moved,
                has_outlines=actors.ledger.has_outlines,
            )
            for own, demonstrations in zip(shares, split, strict=True)
        ]
    )
    metrics["perf/exchange_s"] += time.perf_counter() - started
    return train_share(actors, trainer, share, beside) | metrics


def share_groups(
    actors: Actors, trainer: Trainer, groups: Sequence[Group], advantages: Sequence[Sequence[RunAdvantage]]
) -> tuple[list[list[GroupShare]], dict[str, float]]:
    """The groups that each rank trains, and metrics of their balance."""
    costs, owners = measure_work(actors, trainer, groups, advantages)
    num_ranks = actors.ranks.world_size
    assigned = assign_groups(costs, owners, num_ranks, num_minibatches=trainer.num_minibatches)
    shares: list[list[GroupShare]] = [[] for _ in range(num_ranks)]
    loads = [0.0] * num_ranks
    for group, place, row, cost, rank in zip(groups, list_places(groups), advantages, costs, assigned, strict=True):
        origin = actors.ledger.find_origin(group)
        is_kept = origin is not None and (origin.rank == rank or not origin.has_tokens)
        key = origin.key if origin is not None and is_kept else None
        shares[rank].append(GroupShare(group=group if key is None else None, key=key, place=place, advantages=row))
        loads[rank] += cost
    rollout_s = actors.ledger.rollout_s or [0.0]  # none where other ranks sample
    metrics = {
        "cluster/num_ranks": float(num_ranks),
        "cluster/num_moved_groups": float(sum(rank != owner for rank, owner in zip(assigned, owners, strict=True))),
        "cluster/imbalance": max(loads) / fmean(loads) - 1 if any(loads) else 0.0,
        "perf/rollout_wait_s": max(rollout_s) - fmean(rollout_s),
        "perf/exchange_s": actors.ledger.exchange_s,
    }
    return shares, metrics


def train_share(
    actors: Actors, trainer: Trainer, share: TrainShare, beside: Sequence[Callable[[], None]] = ()
) -> dict[str, float]:
    """Train this rank's share of a step, together with the other ranks; metrics over all of them."""
    found = actors.ledger.kept | exchange_moved(actors, share.moved)
    groups = [found[each.key] if each.key is not None else each.group for each in share.groups]
    samples, metrics = build_samples(
        [group for group in groups if group is not None],
        [each.advantages for each in share.groups],
        has_hard_credit=share.has_hard_credit,
        places=[each.place for each in share.groups],
    )
    collecting = [partial(collect_groups, actors)] if share.has_outlines else []
    trained = trainer.step(
        [*samples, *share.experts], policy_version=share.policy_version, beside=[*collecting, *beside]
    )
    gathered = actors.ranks.all_gather_objects(metrics)
    metrics = {name: sum(part[name] for part in gathered) for name in metrics} | trained
    metrics["perf/collect_s"] = actors.ledger.collect_s
    actors.ledger.clear()
    return metrics


def find_moved(
    actors: Actors, groups: Sequence[Group], shares: Sequence[Sequence[GroupShare]]
) -> list[tuple[int, int]]:
    """Keys of the groups that a rank trains but neither has run nor receives with its share."""
    origins = [actors.ledger.find_origin(group) for group in groups]
    rank_of_key = {origin.key: origin.rank for origin in origins if origin is not None}
    keys = [(rank, each.key) for rank, share in enumerate(shares) for each in share]
    return [key for rank, key in keys if key is not None and rank_of_key[key] != rank]


def exchange_moved(actors: Actors, moved: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Group]:
    """The groups of these keys, from the ranks that have run them; all ranks call this."""
    if not moved:
        return {}
    kept = actors.ledger.kept
    parts = actors.ranks.all_gather_objects({key: kept[key] for key in moved if key in kept})
    return {key: group for part in parts for key, group in part.items()}


def collect_groups(actors: Actors) -> None:
    """Hand the groups whose outlines the first rank has to it; all ranks call this."""
    started = time.perf_counter()
    own = actors.ledger.take_outlined()
    parts = actors.ranks.gather_objects({} if actors.ranks.is_first else own)
    if parts is not None:
        actors.ledger.add_collected(parts)
    actors.ledger.collect_s += time.perf_counter() - started


def check_step_failures(actors: Actors, batch: Batch, progress: RolloutProgress, *, max_failure_rate: float) -> None:
    """As `check_failures`; if it raises, the rollouts of all ranks are in `progress`."""
    try:
        check_failures(batch.collected, max_failure_rate=max_failure_rate)
    except RolloutError:
        if actors.ledger.has_outlines:
            actors.ranks.broadcast_object("collect")
            collect_groups(actors)
            take_groups(actors, batch, progress)
        raise


def take_groups(actors: Actors, batch: Batch, progress: RolloutProgress) -> None:
    """Put the groups collected from other ranks in place of their outlines."""
    collected = actors.ledger.take_collected()
    batch.replace_groups(collected)
    progress.finished += [run for group in collected.values() for run in group.trajectories]


def list_places(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Index of each group, and of its first trajectory in the batch."""
    starts = np.cumsum([0, *(len(group.trajectories) for group in groups)]).tolist()
    return list(zip(range(len(groups)), starts[:-1], strict=True))


def measure_work(
    actors: Actors, trainer: Trainer, groups: Sequence[Group], advantages: Sequence[Sequence[RunAdvantage]]
) -> tuple[list[float], list[int]]:
    """Cost of training each group, 0 without an advantage, and the rank that has run it, the first if none has."""
    costs, owners = [], []
    for group, row in zip(groups, advantages, strict=True):
        origin = actors.ledger.find_origin(group)
        is_trained = any(advantage is not None for advantage in row)
        size = measure_group(group) if origin is None else origin.cost
        cost = combine_cost(size.num_tokens, size.num_pairs, hidden_size=trainer.hidden_size)
        costs.append(cost if is_trained else 0.0)
        owners.append(0 if origin is None else origin.rank)
    return costs, owners


def assign_groups(costs: Sequence[float], owners: Sequence[int], num_ranks: int, *, num_minibatches: int) -> list[int]:
    """The rank that trains each group; work is balanced within each minibatch, after which ranks wait."""
    assigned = list(owners)
    trained = [index for index, cost in enumerate(costs) if cost > 0]
    for first in range(num_minibatches):
        part = trained[first::num_minibatches]
        ranks = balance_work([costs[index] for index in part], [owners[index] for index in part], num_ranks)
        for index, rank in zip(part, ranks, strict=True):
            assigned[index] = rank
    return assigned


def split_experts(
    experts: Sequence[Sample], num_ranks: int, *, first_group: int, first_trajectory: int
) -> list[list[Sample]]:
    """The demonstrations of each rank, by group; their indices continue those of the batch."""
    shares: list[list[Sample]] = [[] for _ in range(num_ranks)]
    for sample in experts:
        placed = replace(
            sample,
            group_index=first_group + sample.group_index,
            trajectory_index=first_trajectory + sample.trajectory_index,
        )
        shares[sample.group_index % num_ranks].append(placed)
    return shares


def collect_trainer_state(ranks: Ranks, trainer: Trainer) -> dict[str, Any]:
    """The trainer's state, gathered on the first rank, which calls this."""
    if not ranks.is_alone:
        ranks.broadcast_object("state")
    return trainer.state_dict()


def gather_weights(ranks: Ranks, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model that is sharded over ranks, one at a time, on the first rank, which calls this."""
    ranks.broadcast_object("weights")
    return iter_whole_weights(model)


def collect_weights(ranks: Ranks, model: PreTrainedModel) -> dict[str, Tensor] | None:
    """The state of a model that is sharded over ranks, on the CPU of the first rank, which calls this; None if the
    model is whole."""
    if find_sharding(model) is None:
        return None
    ranks.broadcast_object("weights")
    return gather_state(model)


def end_run(ranks: Ranks, result: object) -> None:
    """Let `follow` return the result of the run on the other ranks."""
    ranks.broadcast_object(RunEnd(result=result))


async def follow(
    actors: Actors, trainer: Trainer, branching: Branching | None = None, in_flight: RankMember | None = None
) -> Any:
    """Carry out the orders of the first rank until the run ends; returns its result.

    `branching`: how rollouts of training steps branch; `in_flight`: rollouts that continue while the weights change.
    """
    try:
        return await carry_out_orders(actors, trainer, branching, in_flight)
    finally:
        if in_flight is not None:
            await in_flight.close()


async def carry_out_orders(
    actors: Actors, trainer: Trainer, branching: Branching | None, in_flight: RankMember | None
) -> Any:
    """As `follow`, without ending the rollouts in flight."""
    ranks = actors.ranks

    async def run(work: Callable[[], T]) -> T:
        return work() if in_flight is None else await in_flight.own.run_beside(work)

    while True:
        order: RolloutOrder | GroupOrder | RunEnd | Order = await run(ranks.broadcast_object)
        match order:
            case RolloutOrder():
                async with nullcontext() if in_flight is None else in_flight.held():
                    actors.engine.resume(order.policy_version)
                    await run_share(actors, order, branching=branching)
                    actors.engine.pause()
            case "train":
                if in_flight is not None:
                    in_flight.pause()
                await run(lambda: train_share(actors, trainer, ranks.scatter_objects()))
                trainer.take_times()  # of this rank: they are not shown, and would otherwise pile up
            case "collect":
                collect_groups(actors)
            case "state":
                await run(trainer.state_dict)
            case "weights":
                for _ in iter_whole_weights(trainer.model):
                    pass
            case RunEnd():
                return order.result
            case _:
                assert in_flight is not None, "groups are in flight on all ranks"
                await in_flight.carry_out(order)
