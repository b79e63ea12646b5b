"""Every knob of what happens to groups between the judge and the trainer."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from tunesmith.config.section import Section


class OperatorSection(Section):
    """One operator of a chain."""

    name: str
    """A name from the table of operators, or your own as `module:function`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments that differ from the operator's defaults; unknown ones are errors."""


class ReplaySection(Section):
    """Training again on groups of earlier steps."""

    num_groups: int = Field(default=0, ge=0)
    """Groups of earlier steps that each step trains too; raise it where rollouts cost more than training. Their losses
    are multiplied by truncated importance weights unless `algorithm.correction` says otherwise."""
    capacity: int = Field(default=1024, ge=1)
    """Groups kept; the one of lowest priority goes first."""
    max_staleness: int = Field(default=4, ge=1)
    """A group sampled more policy versions ago is forgotten."""
    max_uses: int = Field(default=3, ge=1)
    """Most times a group is trained again."""
    decay: float = Field(default=2.0, ge=0)
    """Priority is the group's policy version minus this for each time it was trained again."""
    sigma: float = Field(default=0.0, ge=0)
    """Standard deviation of noise on the priority, which lets older groups in."""

    @model_validator(mode="after")
    def _check_use(self) -> ReplaySection:
        if self.num_groups == 0 and self != ReplaySection.model_construct():
            raise ValueError("has no effect with num_groups=0: set num_groups, or leave the rest out")
        if self.capacity < self.num_groups:
            raise ValueError(f"capacity={self.capacity} is less than num_groups={self.num_groups}")
        return self


class ExperienceSection(Section):
    """What happens to groups between the judge and the trainer."""

    operators: tuple[OperatorSection, ...] = ()
    """Applied to the groups of a step, in order: pass_rate_calculator, reward_filter, reward_std_filter, outcome_gate,
    dapo_dynamic_sampling, mask_response_truncated, reward_shaping_mapper, invalid_reward_filter."""
    outcome_key: str | None = None
    """Metric that says from 0 to 1 how well a run did, for selectors, gates and dapo_dynamic_sampling; None takes
    the judge's reward."""
    refill_budget: float = Field(default=1.0, ge=1)
    """Tasks that a step may try, as a multiple of the batch size; above 1, groups that teach nothing are replaced."""
    replay: ReplaySection = ReplaySection()
    """Training again on groups of earlier steps."""
