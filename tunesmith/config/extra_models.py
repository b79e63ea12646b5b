"""Knobs of the critic, the teacher and expert demonstrations, which some algorithms need besides the policy."""

from __future__ import annotations

from pydantic import Field, model_validator

from tunesmith.config.section import LearningRate, Section


class CriticSection(Section):
    """The value model of ppo, with weights and an optimizer of its own."""

    path: str | None = None
    """Model whose body initialises the critic, with the policy's vocabulary; None takes the policy's starting model."""
    learning_rate: LearningRate = 1e-5
    """Constant learning rate of the critic's AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which only the critic is updated; raise it if an untrained critic degrades a good policy."""
    num_epochs: int = Field(default=1, ge=1)
    """Updates of the critic per update of the policy, on the same tokens."""
    clip_range: float | None = Field(default=0.2, gt=0)
    """Range around the value before the critic's first update on the same tokens, outside of which the value loss is
    clipped; it acts from the second of `num_epochs` on. None does not clip."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm to which the critic's gradients are clipped."""

    @model_validator(mode="after")
    def _check_clip_range(self) -> CriticSection:
        default = CriticSection.model_fields["clip_range"].default
        if self.num_epochs == 1 and self.clip_range not in (None, default):
            raise ValueError(f"clip_range={self.clip_range} has no effect with num_epochs=1: raise num_epochs")
        return self


class TeacherSection(Section):
    """The frozen model whose logprobs the policy is trained towards."""

    path: str
    """Folder or hub id of a causal language model with the policy's vocabulary."""


class ExpertSection(Section):
    """Expert demonstrations that are trained together with the policy's own runs."""

    path: str
    """Folder of jsonl, json, csv or parquet files, one such file, or a hub id; rows have `messages` and optionally
    `tools`."""
    name: str | None = None
    """Configuration name of a data set that has several."""
    split: str | None = "train"
    """Split of the data set."""
    ratio: float = Field(default=0.5, gt=0, lt=1)
    """Share of demonstrations among the sequences of a step in which every rollout is trained."""
