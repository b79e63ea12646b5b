"""Knobs of rollouts that continue while the weights change."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tunesmith.config.section import Needs, Section


class StalenessKnobs(Section):
    """How old a token may be when it is trained, and what unfinished replies continue from."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum number of steps between the weights that sample a token and those that train on it. Above 0 a step trains
    on the first complete groups, and rollouts that have not ended continue under the new weights; raise it (1 to 4) if
    steps wait for a few slow rollouts. 0 waits for all rollouts of a step."""
    stale_cache: Annotated[Literal["recompute", "keep"], Needs("max_staleness", above=0)] = "recompute"
    """Keys and values of unfinished replies after an update. recompute: those of the new
    weights; keep: the old ones, which saves the prefill, and the rest of the reply has the policy version that they
    had."""


def check_staleness_knobs(
    knobs: StalenessKnobs, *, replay_staleness: int | None, has_branching: bool, is_served: bool
) -> None:
    """Raise a ValueError if the run cannot train on tokens of older weights.

    `replay_staleness`: the maximum age of replayed groups, None without replay.
    """
    if knobs.max_staleness == 0:
        return
    reasons = {
        "rollout.branching": (
            has_branching,
            "a branch would continue a rollout of other weights; leave one of them out",
        ),
        "serve": (is_served, "workers run each task to its end; leave max_staleness out"),
        f"experience.replay.max_staleness={replay_staleness}": (
            replay_staleness is not None and replay_staleness > knobs.max_staleness,
            f"replayed groups would be older; set it to {knobs.max_staleness} or less",
        ),
    }
    for what, (is_wrong, advice) in reasons.items():
        if is_wrong:
            raise ValueError(f"rollout.max_staleness={knobs.max_staleness} does not work with {what}: {advice}")
