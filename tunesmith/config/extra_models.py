"""What some algorithms need besides the policy: a critic, a teacher, demonstrations of experts."""

from __future__ import annotations

from pydantic import Field, model_validator

from tunesmith.config.section import LearningRate, Section


class CriticSection(Section):
    """The model that predicts how a run will end, with weights and an optimizer of its own."""

    path: str | None = None
    """Model whose body the critic starts from, with the policy's vocabulary; None takes the policy's own."""
    learning_rate: LearningRate = 1e-5
    """Constant learning rate of the critic's AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which the critic learns and the policy stays as it is; raise it where a critic that knows nothing
    yet spoils a good policy."""
    num_epochs: int = Field(default=1, ge=1)
    """Updates of the critic for each update of the policy, on the same tokens."""
    clip_range: float | None = Field(default=0.2, gt=0)
    """How far a value may move from what it was before the critic's first update on its tokens before it stops pulling;
    it acts from the second of `num_epochs` on. None does not clip."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of the critic of larger norm are scaled down to it."""

    @model_validator(mode="after")
    def _check_clip_range(self) -> CriticSection:
        default = CriticSection.model_fields["clip_range"].default
        if self.num_epochs == 1 and self.clip_range not in (None, default):
            raise ValueError(f"clip_range={self.clip_range} has no effect with num_epochs=1: raise num_epochs")
        return self


class TeacherSection(Section):
    """The model that is imitated; it is never trained."""

    path: str
    """Folder or hub id of a causal language model with the policy's vocabulary."""


class ExpertSection(Section):
    """Conversations of experts that are trained beside the policy's own."""

    path: str
    """Folder of jsonl, json, csv or parquet files, one such file, or a hub id; rows have `messages` and perhaps
    `tools`."""
    name: str | None = None
    """Configuration of a data set that has several."""
    split: str | None = "train"
    """Which split to read."""
    ratio: float = Field(default=0.5, gt=0, lt=1)
    """Share of demonstrations among the sequences of a step, when every rollout of it trains."""
