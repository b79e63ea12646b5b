"""Knobs of rollouts that continue while the weights change."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tunesmith.config.section import Section


class StalenessKnobs(Section):
    """How old a token may be when it is trained, and what unfinished replies continue from."""

    max_staleness: int = Field(default=0, ge=0)
    """Maximum number of steps between the weights that sample a token and those that train on it. Above 0 a step trains
    on the first complete groups, and rollouts that have not ended continue under the new weights; raise it (1 to 4) if
    steps wait for a few slow rollouts. 0 waits for all rollouts of a step."""
    stale_cache: Literal["recompute", "keep"] = "recompute"
    """Keys and values of unfinished replies after an update, with `max_staleness` above 0. recompute: those of the new
    weights; keep: the old ones, which saves the prefill, and the rest of the reply has the policy version that they
    had."""
