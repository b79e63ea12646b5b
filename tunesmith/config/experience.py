"""Knobs of operators on groups, refills and replay: everything between judge and trainer."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from tunesmith.config.section import Needs, Section


class OperatorSection(Section):
    """One operator of a chain, with its arguments."""

    name: str
    """Name of a built-in operator, or your own as `module:function`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the operator that differ from its defaults."""


REPLAYED = Needs("num_groups", above=0)


class ReplaySection(Section):
    """Replay of groups from earlier steps."""

    num_groups: int = Field(default=0, ge=0)
    """Replayed groups per step, 0 for none; raise it if rollouts take longer than training. Their losses are multiplied
    by truncated importance weights unless `algorithm.correction` is set otherwise."""
    capacity: Annotated[int, REPLAYED] = Field(default=1024, ge=1)
    """Groups kept in the buffer; the one with the lowest priority is evicted first."""
    max_staleness: Annotated[int, REPLAYED] = Field(default=4, ge=1)
    """Maximum age of a group in policy versions; older groups are evicted. Lower it to stay closer to on-policy."""
    max_uses: Annotated[int, REPLAYED] = Field(default=3, ge=1)
    """Maximum number of times a group is replayed."""
    decay: Annotated[float, REPLAYED] = Field(default=2.0, ge=0, allow_inf_nan=False)
    """Amount by which each replay lowers a group's priority, which starts at its policy version."""
    sigma: Annotated[float, REPLAYED] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Standard deviation of noise added to priorities; raise it to replay older groups too."""

    @model_validator(mode="after")
    def _check_use(self) -> ReplaySection:
        if self.capacity < self.num_groups:
            raise ValueError(f"capacity={self.capacity} is less than num_groups={self.num_groups}")
        return self


class ExperienceSection(Section):
    """Processing of groups between judge and trainer."""

    operators: tuple[OperatorSection, ...] = ()
    """Operators on the groups of a step, applied in order: pass_rate_calculator, reward_filter, reward_std_filter,
    outcome_gate, dapo_dynamic_sampling, mask_response_truncated, reward_shaping_mapper, invalid_reward_filter,
    efficiency_reward, arpo_reward."""
    outcome_key: str | None = None
    """Metric from 0 to 1 that selectors, outcome_gate and dapo_dynamic_sampling use as a rollout's outcome; null uses
    the judge's reward."""
    refill_budget: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    """Maximum number of tasks tried per step, as a multiple of the batch size; above 1, groups with zero advantage are
    replaced by new ones."""
    replay: ReplaySection = ReplaySection()
    """Replay of groups from earlier steps."""
