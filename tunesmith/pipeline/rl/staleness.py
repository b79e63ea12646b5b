"""Rollouts in flight over several steps: which runs can have them, and how they are built for a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import torch

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.table import ON_POLICY_ONLY
from tunesmith.cluster.place import find_place
from tunesmith.config import RunConfig
from tunesmith.engine.engine import LocalEngine
from tunesmith.errors import ConfigError
from tunesmith.pipeline.session.policy import Policy
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.in_flight.in_flight_groups import InFlightGroups
from tunesmith.rollout.in_flight.own_groups import InFlightLimits, OwnGroups
from tunesmith.tasks.task_feed import TaskFeed

T = TypeVar("T")


def check_staleness(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise if the run cannot train on tokens of older weights."""
    rollout, replay = config.rollout, config.experience.replay
    if rollout.max_staleness == 0:
        if rollout.stale_cache != type(rollout).model_fields["stale_cache"].default:
            raise ConfigError(
                f"rollout.stale_cache={rollout.stale_cache} has no effect with rollout.max_staleness=0: raise it, or "
                "leave out stale_cache"
            )
        return
    num_ranks = max(config.cluster.num_workers or 1, find_place().world_size)
    reasons = {
        f"algorithm.algorithm_type={algorithm.name!r}": (
            algorithm.name in ON_POLICY_ONLY or "baselines" in algorithm.needs,
            "it is defined for tokens of the current weights only; choose another, such as multi_step_grpo",
        ),
        "rollout.branching": (
            rollout.branching is not None,
            "a branch would continue a rollout of other weights; leave one of them out",
        ),
        "serve": (config.serve is not None, "workers run each task to its end; leave max_staleness out"),
        f"{num_ranks} ranks": (
            num_ranks > 1,
            "rollouts stay in flight on one rank only; leave max_staleness out, or set cluster.num_workers=1",
        ),
        f"experience.replay.max_staleness={replay.max_staleness}": (
            replay.num_groups > 0 and replay.max_staleness > rollout.max_staleness,
            f"replayed groups would be older; set it to {rollout.max_staleness} or less",
        ),
    }
    for what, (is_wrong, advice) in reasons.items():
        if is_wrong:
            raise ConfigError(f"rollout.max_staleness={rollout.max_staleness} does not work with {what}: {advice}")


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
    own = OwnGroups(actors, policy.engine, limits, seed=config.seed, prepare_thread=prepare)
    return InFlightGroups(own, feed, limits)


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
