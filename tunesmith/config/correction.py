"""Knobs of off-policy correction and of the adaptive KL coefficient."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tunesmith.config.section import Section


class MaskSection(Section):
    """Masks tokens whose importance weight (policy at the start of the step over sampler) is out of bounds."""

    level: Literal["token", "sequence", "geometric"]
    """Importance weight compared with the limits: of each token, the product over its sequence, or the geometric mean
    over its sequence."""
    low: float = Field(ge=0)
    """Lower limit; about 0.5 for tokens, 0.999 for geometric means of a large model."""
    high: float = Field(gt=0)
    """Upper limit; about 5 for tokens, 1.001 for geometric means of a large model."""

    @model_validator(mode="after")
    def _check_order(self) -> MaskSection:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self


class CorrectionSection(Section):
    """Correction for tokens that were not sampled by the policy at the start of the step."""

    importance: Literal["auto", "none", "token", "sequence"] = "auto"
    """Multiply losses by truncated importance weights, per token or per sequence; costs one extra forward per step,
    except with token weights and a single update per step. auto uses token weights for on-policy algorithms in steps
    that train replayed groups, and with `engine.weight_format=fp8`."""
    cap: float = Field(default=2.0, ge=1)
    """Upper bound of importance weights. Only used with `importance` token or sequence, or with auto and either
    `experience.replay.num_groups` above 0 or `engine.weight_format=fp8`; otherwise setting it is an error."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Lower bound of importance weights; set it (0.5 is usual) so that tokens that the policy has made improbable since
    sampling keep part of their gradient. 0: no lower bound. Used where `cap` is."""
    mask: MaskSection | None = None
    """Exclude tokens whose importance weight is out of bounds from the policy loss; null keeps all."""
    negative_sequence_delta: float | None = Field(default=None, ge=0)
    """Exclude sequences with negative mean advantage if their mean log-ratio of sampler to policy exceeds this; 0.1 is
    usual. null keeps all."""


class AdaptiveKlSection(Section):
    """Adapts the KL coefficient so that the KL approaches a target."""

    target: float = Field(gt=0)
    """Target of the mean KL to the starting model, in nats per token."""
    horizon: int = Field(default=10000, ge=1)
    """Trajectories over which the coefficient changes by at most 20 %; lower it to react faster."""
