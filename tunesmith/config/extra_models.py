"""Knobs of the critic, the teacher and the expert demonstrations that some algorithms need."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tunesmith.config.section import LearningRate, Needs, Section


class CriticSection(Section):
    """The value model of ppo, with its own weights and optimizer."""

    path: str | None = None
    """Model that initializes the critic's body; it must have the policy's vocabulary. null uses the policy's model."""
    learning_rate: LearningRate = 1e-5
    """Learning rate of the critic's AdamW; constant."""
    warmup_steps: int = Field(default=0, ge=0)
    """Initial steps that train only the critic; raise it if an untrained critic degrades a good policy."""
    num_epochs: int = Field(default=1, ge=1)
    """Critic updates per policy update, on the same tokens."""
    clip_range: Annotated[float | None, Needs("num_epochs", above=1)] = Field(default=0.2, gt=0)
    """Value clipping: maximum change of a value from the one before the critic's first update on its tokens. null
    disables clipping."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Maximum gradient norm of the critic; larger gradients are scaled down."""


class TeacherSection(Section):
    """The frozen model that distillation imitates."""

    path: str
    """Folder or hub id of a causal language model with the policy's vocabulary."""


class ExpertSection(Section):
    """Expert demonstrations that are mixed into each update."""

    path: str
    """Folder of jsonl, json, csv or parquet files, one such file, or a hub id; rows have `messages` and
    optionally `tools`."""
    name: str | None = None
    """Configuration (subset) of a data set that has several."""
    split: str | None = "train"
    """Split to read."""
    ratio: float = Field(default=0.5, gt=0, lt=1)
    """Share of demonstrations among the sequences of a step in which every rollout is trained."""
