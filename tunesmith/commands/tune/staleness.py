"""Rollouts in flight over several steps: which runs can have them, and how they are built for a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from tunesmith.cluster.links import connect_links
from tunesmith.cluster.ranks import Ranks
from tunesmith.cluster.roles import RankRoles
from tunesmith.config import RunConfig
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.step_windows import open_windows
from tunesmith.errors import RankError
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.in_flight.in_flight_groups import GroupSite, InFlightGroups
from tunesmith.rollout.in_flight.own_groups import InFlightLimits, OwnGroups
from tunesmith.rollout.in_flight.rank_groups import RankGroups, RankMember
from tunesmith.rollout.in_flight.remote_groups import RemoteGroups
from tunesmith.rollout.in_flight.sampling_rank import SamplingRank
from tunesmith.runs.policy import Policy
from tunesmith.tasks.task_feed import TaskFeed
from tunesmith.trainer.optimizer import find_trainable

T = TypeVar("T")


def build_in_flight(
    config: RunConfig, policy: Policy, actors: Actors, feed: TaskFeed, roles: RankRoles, *, total_steps: int
) -> tuple[Actors, InFlightGroups | None]:
    """The rollouts in flight of a run, None if its steps wait for all of theirs; and the actors of its evaluations."""
    if config.rollout.max_staleness == 0:
        return actors, None
    site: GroupSite
    if roles.samplers:
        site = build_remote_groups(config, policy, actors, roles)
        actors = replace(actors, remote=site)
    elif actors.ranks.is_alone:
        site = build_own_groups(config, policy, actors)
    else:
        member = build_member(config, policy, actors, roles)
        assert member is not None, "rollouts are in flight on all ranks or on none"
        site = RankGroups(member, is_balanced=config.rollout.assignment == "balanced")
    return actors, InFlightGroups(site, feed, build_limits(config, total_steps=total_steps))


def build_member(config: RunConfig, policy: Policy, actors: Actors, roles: RankRoles) -> RankMember | None:
    """The rollouts in flight of a rank that trains and samples; None if it has none."""
    if roles.samplers:
        connect_links(roles.world, roles.samplers, timeout_s=config.cluster.timeout_s)  # of the other ranks
        return None
    if config.rollout.max_staleness == 0:
        return None
    engines = [each for each in (actors.engine, *actors.auxiliary_engines) if isinstance(each, LocalEngine)]
    return RankMember(
        actors,
        build_own_groups(config, policy, actors),
        connect_links(roles.world, range(1, roles.world.world_size), timeout_s=config.cluster.timeout_s),
        open_clock=partial(open_windows, engines=engines, has_windows=policy.model.device.type == "cpu"),
        timeout_s=config.cluster.timeout_s,
    )


def build_remote_groups(config: RunConfig, policy: Policy, actors: Actors, roles: RankRoles) -> RemoteGroups:
    """The rollouts in flight on ranks that only sample, on the first rank."""
    weights = list(find_trainable(policy.model).values())
    return RemoteGroups(
        connect_links(roles.world, roles.samplers, timeout_s=config.cluster.timeout_s),
        actors.ledger,
        send_weights=partial(roles.send_weights, weights),
        num_elements=sum(each.numel() for each in weights),
        max_staleness=config.rollout.max_staleness,
        is_balanced=config.rollout.assignment == "balanced",
        timeout_s=config.cluster.timeout_s,
        prepare_thread=build_thread_start(policy),
    )


def build_sampling_rank(config: RunConfig, policy: Policy, actors: Actors, roles: RankRoles) -> SamplingRank:
    """What this rank runs, which only samples."""
    index, weights = roles.samplers.index(roles.world.rank), list(find_trainable(policy.model).values())
    num_elements = sum(each.numel() for each in weights)

    def take_weights(expected: int) -> None:
        if expected != num_elements:
            raise RankError(f"this rank has {num_elements} weights to overwrite, and the first one sends {expected}")
        roles.send_weights(weights)

    actors = replace(actors, ranks=Ranks(rank=index, world_size=len(roles.samplers)))
    links = connect_links(roles.world, roles.samplers, timeout_s=config.cluster.timeout_s)
    own = build_own_groups(config, policy, actors)
    return SamplingRank(actors, own, links.first, take_weights=take_weights, timeout_s=config.cluster.timeout_s)


def build_own_groups(config: RunConfig, policy: Policy, actors: Actors) -> OwnGroups:
    """The rollouts in flight that run in this process."""
    assert isinstance(policy.engine, LocalEngine), "the run file was checked: engine.kind is tunesmith"
    limits, prepare = build_limits(config), build_thread_start(policy)
    return OwnGroups(actors, policy.engine, limits, seed=config.seed, prepare_thread=prepare)


def build_thread_start(policy: Policy) -> Callable[[], None]:
    """What a thread that uses the policy's device does first."""
    device = policy.model.device
    return partial(torch.cuda.set_device, device) if device.type == "cuda" else lambda: None


def build_limits(config: RunConfig, *, total_steps: int = 0) -> InFlightLimits:
    return InFlightLimits(
        group_size=config.algorithm.group_size,
        batch_size=config.algorithm.batch_size,
        max_staleness=config.rollout.max_staleness,
        total_steps=total_steps,
        keeps_cache=config.rollout.stale_cache == "keep",
    )


async def run_beside_rollouts(in_flight: InFlightGroups | None, work: Callable[[], None]) -> None:
    """Run blocking work; with rollouts in flight in a thread, so that their tools continue."""
    if in_flight is None:
        work()
    else:
        await in_flight.run_beside(work)


async def end_in_flight(
    training: Callable[[], Awaitable[T]], in_flight: InFlightGroups | None, show_line: Callable[[str], None]
) -> T:
    """Run the training, then cancel what is in flight."""
    try:
        return await training()
    finally:
        if in_flight is not None and (num_cancelled := await in_flight.close()):
            show_line(f"{num_cancelled} groups in flight were cancelled; a resumed run starts their tasks again")


def describe_in_flight(in_flight: InFlightGroups | None) -> dict[str, Any]:
    """What a checkpoint holds of rollouts in flight; nothing without them."""
    return {} if in_flight is None else {"in_flight": in_flight.state_dict()}
