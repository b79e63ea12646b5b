"""Knobs of branching rollouts (ARPO, AEPO)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tunesmith.config.section import Section


class BranchingSection(Section):
    """Branching rollouts: where the model is unsure after a tool result, a rollout continues in several ways."""

    initial_rollouts: int | None = Field(default=None, ge=1)
    """Rollouts of a group that start from the task; the others branch from them, and what no branch used starts from
    the task at the end. null takes half of `algorithm.group_size`, rounded up. Raise it for tasks whose first turns
    decide."""
    beam: int = Field(default=2, ge=2)
    """Continuations at a branch point at most, the rollout's own included; each further one is drawn separately."""
    entropy_window: int = Field(default=20, ge=1)
    """Sampled tokens after a tool result, and at the start of the rollout, whose entropy is compared."""
    base_probability: float = Field(default=0.5, ge=0, le=1)
    """Probability of a branch where the entropy after a tool result equals that at the start of the rollout."""
    entropy_weight: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """Change of the probability per unit of entropy, the sum over the window divided by the log of the vocabulary
    size. 0 branches everywhere with `base_probability`; raise it if branches should follow the entropy more closely."""
    consecutive_penalty: float = Field(default=0.0, ge=0, le=1)
    """Share of the probability that each consecutive branch before on the same path takes away (AEPO); 0 takes away
    none. Set it if most branches of a group lie on one path."""
    dynamic_budget_slope: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Choose the number of initial rollouts of each group from the entropies of its first rollout (AEPO): group size x
    sigmoid(slope x (entropy at the start - mean entropy after tool results)). The other rollouts of the group wait for
    the first one. null uses `initial_rollouts`; with a slope these count only if the first rollout calls no tool."""
    credit: Literal["soft", "hard"] = "soft"
    """Advantage of tokens that several rollouts share: soft trains them once per rollout, with the advantage of each;
    hard trains them once, with the mean advantage."""


def check_branching(section: BranchingSection | None, assignment: str, *, group_size: int, temperature: float) -> None:
    """Raise a ValueError if a run with these settings cannot branch as the section says; `assignment` of tasks."""
    if section is None:
        return
    if assignment == "balanced":
        raise ValueError(
            "rollout.assignment=balanced with rollout.branching: set rollout.assignment=plan, or leave out branching"
        )
    if group_size < 2:
        raise ValueError(f"rollout.branching needs algorithm.group_size of at least 2; it is {group_size}")
    if section.initial_rollouts is not None and section.initial_rollouts >= group_size:
        raise ValueError(
            f"rollout.branching.initial_rollouts={section.initial_rollouts} leaves no branch in a group of "
            f"algorithm.group_size={group_size}: lower it, or leave out rollout.branching"
        )
    if temperature == 0:
        raise ValueError(
            "rollout.branching with model.temperature=0: a branch would repeat its parent; raise the temperature"
        )
