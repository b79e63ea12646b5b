"""Knobs of supervised fine-tuning (`tunesmith sft`), and those shared with preference training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.callbacks import PatienceSection
from tunesmith.config.model import ModelSection
from tunesmith.config.run import MonitorSection, TrainerSection
from tunesmith.config.section import LearningRate, NumThreads, Section, Unused

NOTHING_SAMPLED = Unused(("num_minibatches", "mismatch_warn", "mismatch_stop"), "nothing is sampled")
"""Knobs of the trainer that only apply to sampled tokens."""
SAMPLING_KNOBS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "tool_call_parser", "reasoning_parser")
"""Knobs of the model that only apply to sampling and to parsing sampled text."""


class ConversationDataSection(Section):
    """A data set of conversations (rows with `messages` and optionally `tools`), rendered `text`, or preferences."""

    path: str | tuple[str, ...]
    """Folder (also one written by `save_to_disk`), jsonl, json or parquet file, or hub id; or a list of them,
    concatenated."""
    name: str | None = None
    """Configuration (subset) of a data set that has several."""
    split: str | None = "train"
    """Split to read."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class SftTrainerSection(TrainerSection):
    """Optimizer, memory and speed of supervised fine-tuning."""

    learning_rate: LearningRate = 2e-4
    """Peak learning rate of AdamW; the default suits adapters. It must be set to train all weights (2e-5 is usual)."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Warm-up as a share of all steps, if `warmup_steps` is 0."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Learning rate schedule after the warm-up."""


class OfflineConfig(Section):
    """Training on given rows, without sampling: model, data, batches, schedule and checkpoints."""

    model: Annotated[ModelSection, Unused(SAMPLING_KNOBS, "nothing is sampled")]
    """Model to train; with `model.lora`, only an adapter on it. Knobs of sampling are errors."""
    train_dataset: ConversationDataSection
    """Training rows."""
    eval_dataset: ConversationDataSection | None = None
    """Held-out rows, on which the loss is computed to choose the best weights."""
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training rows that is held out at random, instead of an `eval_dataset`. Whole prompts are held out,
    at most this share of the rows, so that no prompt is on both sides; single rows if each prompt has more rows."""
    long_rows: Literal["error", "drop"] = "error"
    """Handling of rows longer than `model.max_model_len`: error stops before training, drop skips and counts them."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the training rows."""
    max_steps: int | None = Field(default=None, ge=1)
    """Maximum number of updates; training and the learning rate schedule end there, even within an epoch. null trains
    whole epochs."""
    max_tokens_per_batch: int = Field(default=16384, ge=1)
    """Tokens per update; a longer row becomes a batch alone. `trainer.max_tokens_per_row` limits how many are computed
    at once."""
    max_rows_per_batch: int | None = Field(default=None, ge=1)
    """Maximum number of rows per update; null limits only the tokens."""
    has_shuffling: bool = True
    """Shuffle the rows in every epoch. Disable it if the order of the file is a curriculum."""
    seed: int = Field(default=42, ge=0)
    """Random seed of row order, held-out rows and dropout."""
    num_cpu_threads: NumThreads = 1
    """Threads of torch's CPU kernels. On small virtual machines 2 are slower than 1; on machines with many cores try
    more."""
    evaluation_interval_steps: int = Field(default=100, ge=0)
    """Steps between computations of the evaluation loss; 0 computes it only at the end."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints for resuming; the weights of a new best evaluation are always saved."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Number of newest checkpoints kept on disk, also after the end; during training the best one is kept too. null
    keeps 1 during training and 0 once `model/` is written."""
    early_stopping: PatienceSection | None = None
    """End once the evaluation loss no longer falls; null trains all steps. The learning rate schedule is that of all
    steps."""
    trainer: Annotated[SftTrainerSection, NOTHING_SAMPLED] = SftTrainerSection()
    """Optimizer, memory and speed."""
    monitor: MonitorSection = MonitorSection()
    """Trackers and console output."""

    @model_validator(mode="after")
    def _check_evaluation(self) -> OfflineConfig:
        if self.eval_dataset is not None and self.eval_fraction > 0:
            raise ValueError("eval_dataset and eval_fraction are both given: set only one of them")
        has_held_out = self.eval_dataset is not None or self.eval_fraction > 0
        if self.early_stopping is not None and not (has_held_out and self.evaluation_interval_steps):
            raise ValueError(
                "early_stopping needs held-out rows and evaluations during training: set eval_dataset or "
                "eval_fraction, and evaluation_interval_steps above 0"
            )
        interval, default = (
            self.evaluation_interval_steps,
            OfflineConfig.model_fields["evaluation_interval_steps"].default,
        )
        if not has_held_out and interval != default:
            raise ValueError(
                f"evaluation_interval_steps={interval} has no effect without held-out rows: set eval_dataset or "
                "eval_fraction"
            )
        return self


class SftConfig(OfflineConfig):
    """Supervised fine-tuning of a model on conversations."""

    algorithm_type: Literal["sft", "sft_is", "sft_phi"] = "sft"
    """Token loss: sft is cross entropy; sft_is and sft_phi weight it by p and by p (1 - p), where p is the model's
    probability of the token. Choose one of them to preserve more of the model's abilities."""

    @model_validator(mode="after")
    def _check_learning_rate(self) -> SftConfig:
        if self.model.lora is None and "learning_rate" not in self.trainer.model_fields_set:
            default = SftTrainerSection.model_fields["learning_rate"].default
            raise ValueError(
                f"trainer.learning_rate must be set to train all weights: its default {default:g} suits adapters "
                "(model.lora); 2e-5 is usual"
            )
        return self
