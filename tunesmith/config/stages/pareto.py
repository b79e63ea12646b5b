"""Knobs of group-wise Pareto sampling of questions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from tunesmith.config.section import Needs, Section


class ParetoSection(Section):
    """Selection of questions by the spread of correctness and of tool calls over their rollouts."""

    data: str
    """JSON lines file, or another data set file, of questions with the numbers of each rollout; usually the output of a
    `pass_rate` stage."""
    num_selected: int = Field(default=8000, ge=1)
    """Maximum number of questions to select."""
    correctness_key: str = "pass_rate_correctness"
    """Field with the correctness of each rollout, a list."""
    tool_calls_key: str = "pass_rate_tool_calls"
    """Field with the number of tool calls of each rollout, a list."""
    correct_at: float = Field(default=0.75, gt=0)
    """Correctness from which a rollout counts as right; questions without a right and a wrong rollout are removed
    before the selection."""
    stratify_by: str | None = None
    """Field with the source of a question. If set, fronts are found within each source, and the sources share the
    selection in proportion to their questions with mixed outcomes; null finds fronts over all questions."""
    shares: Annotated[dict[str, float] | None, Needs("stratify_by")] = None
    """Relative share of each source in the selection, instead of proportional ones; sources without one are left
    out."""
    seed: int = Field(default=42, ge=0)
    """Seed of ties between questions with equal spreads."""

    @model_validator(mode="after")
    def _check_shares(self) -> ParetoSection:
        if self.shares is not None and not (self.shares and all(share > 0 for share in self.shares.values())):
            raise ValueError(f"shares={self.shares} must give every source that it names a share above 0")
        return self
