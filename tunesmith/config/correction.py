"""Corrections of importance weights, and the coefficient of the KL that follows a target."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tunesmith.config.section import Section


class MaskSection(Section):
    """Tokens that do not train because the step's first policy and the sampler disagree on them."""

    level: Literal["token", "sequence", "geometric"]
    """What is compared with the limits: each token's importance weight, the product over its sequence, or the
    geometric mean over its sequence."""
    low: float = Field(ge=0)
    """Smaller importance weights are masked; about 0.5 for tokens, 0.999 for geometric means of a large model."""
    high: float = Field(gt=0)
    """Larger importance weights are masked; about 5 for tokens, 1.001 for geometric means of a large model."""

    @model_validator(mode="after")
    def _check_order(self) -> MaskSection:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self


class CorrectionSection(Section):
    """What is done about tokens that another policy sampled than the one that the step begins with."""

    importance: Literal["auto", "none", "token", "sequence"] = "auto"
    """Multiply losses by truncated importance weights, of tokens or of whole sequences; costs one forward more a step.
    auto does so for tokens, in steps that train groups of older policy versions, for algorithms made for data of the
    newest."""
    cap: float = Field(default=2.0, ge=1)
    """Importance weights are truncated to this, where there are any: with `importance` token or sequence, or with auto
    and `experience.replay.num_groups`; elsewhere another value than the default is an error."""
    mask: MaskSection | None = None
    """Leave tokens whose importance weight is out of bounds out of the policy's loss; None keeps all."""
    negative_sequence_delta: float | None = Field(default=None, ge=0)
    """Leave tokens of negative advantage out where the mean log-ratio of sampler and policy over their sequence is
    above this, about 0.1; None keeps all."""


class AdaptiveKlSection(Section):
    """Follow a target with the coefficient of the KL."""

    target: float = Field(gt=0)
    """Mean KL to the starting model, in nats a token, that the coefficient is steered to."""
    horizon: int = Field(default=10000, ge=1)
    """Trajectories over which a coefficient that is off would at most change by a fifth of itself."""
