"""Rollouts in flight over several steps: which runs can have them, and how they are built for a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import torch

from tunesmith.cluster.place import find_place
from tunesmith.config import RunConfig
from tunesmith.engine.engine import LocalEngine
from tunesmith.errors import ConfigError
from tunesmith.pipeline.session.policy import Policy
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.in_flight.in_flight_groups import InFlightGroups, InFlightLimits
from tunesmith.tasks.task_feed import TaskFeed

T = TypeVar("T")


def check_staleness(config: RunConfig) -> None:
    """Raise if this process is one of several ranks, whose rollouts cannot stay in flight."""
    num_ranks = max(config.cluster.num_workers or 1, find_place().world_size)
    if config.rollout.max_staleness and num_ranks > 1:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness} does not work with {num_ranks} ranks: rollouts stay "
            "in flight on one rank only; leave max_staleness out, or set cluster.num_workers=1"
        )


def build_in_flight(
    config: RunConfig, policy: Policy, actors: Actors, feed: TaskFeed, *, total_steps: int
) -> InFlightGroups | None:
    """The rollouts in flight of a run; None if its steps wait for all of theirs."""
    if config.rollout.max_staleness == 0:
        return None
    assert isinstance(policy.engine, LocalEngine), "the run file was checked: engine.kind is tunesmith"
    device = policy.model.device
    limits = InFlightLimits(
        group_size=config.algorithm.group_size,
        batch_size=config.algorithm.batch_size,
        max_staleness=config.rollout.max_staleness,
        total_steps=total_steps,
        keeps_cache=config.rollout.stale_cache == "keep",
    )
    prepare = partial(torch.cuda.set_device, device) if device.type == "cuda" else lambda: None
    return InFlightGroups(actors, policy.engine, feed, limits, seed=config.seed, prepare_thread=prepare)


async def run_beside_rollouts(in_flight: InFlightGroups | None, work: Callable[[], None]) -> None:
    """Run blocking work; with rollouts in flight in a thread, so that their tools go on."""
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
