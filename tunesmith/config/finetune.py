"""Every knob of supervised fine-tuning (`tunesmith sft`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tunesmith.config.model import ModelSection
from tunesmith.config.run import MonitorSection, TrainerSection
from tunesmith.config.section import LearningRate, NumThreads, Section

REWARD_KEYS = ("num_minibatches", "mismatch_warn", "mismatch_stop")
"""Knobs of the trainer that speak of sampled tokens, of which fine-tuning has none."""
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "tool_call_parser", "reasoning_parser")
"""Knobs of the model that say how it samples, and how what it sampled is read."""


class DemonstrationSection(Section):
    """Where conversations to learn from are: rows with `messages` and perhaps `tools`, or with rendered `text`."""

    path: str | tuple[str, ...]
    """Folder (also one that `save_to_disk` wrote), jsonl, json or parquet file, or hub id; or a list of them, read one
    after the other."""
    name: str | None = None
    """Configuration of a data set that has several."""
    split: str | None = "train"
    """Which split to read."""

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if isinstance(self.path, str) else self.path


class FinetuneTrainerSection(TrainerSection):
    """How a batch of demonstrations becomes an update."""

    learning_rate: LearningRate = 2e-4
    """Peak learning rate of AdamW; the default suits adapters, and where whole weights train it must be given."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of all steps over which the learning rate rises from 0, where `warmup_steps` is 0."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Learning rate after the warm-up."""

    @model_validator(mode="after")
    def _refuse_what_needs_rewards(self) -> FinetuneTrainerSection:
        for key in REWARD_KEYS:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect on fine-tuning, which samples nothing: leave it out")
        return self


class OfflineConfig(Section):
    """One training on rows that are given: which model learns from which of them, and how."""

    model: ModelSection
    """The model that learns; with `model.lora` only an adapter on it. It samples nothing, so nothing may say how."""
    train_dataset: DemonstrationSection
    """Rows to learn from."""
    eval_dataset: DemonstrationSection | None = None
    """Rows on which the loss is measured and by which the best weights are chosen."""
    eval_fraction: float = Field(default=0.0, ge=0, lt=1)
    """Share of the training rows, drawn by the seed, that is held out in place of an `eval_dataset`."""
    long_rows: Literal["error", "drop"] = "error"
    """What becomes of rows longer than `model.max_model_len`: error stops before training, drop leaves them out and
    counts them."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over the rows."""
    max_steps: int | None = Field(default=None, ge=1)
    """Most updates: training ends there, in the middle of an epoch too, and so does the schedule of the learning rate.
    None makes whole epochs."""
    max_tokens_per_batch: int = Field(default=16384, ge=1)
    """Tokens of one update; a longer row is a batch of its own. `trainer.max_tokens_per_row` says how many of
    them are computed at once."""
    max_rows_per_batch: int | None = Field(default=None, ge=1)
    """Most rows of one update; None leaves it to the tokens."""
    has_shuffling: bool = True
    """Take the rows in a new order each epoch; turn off where the order of the file is a curriculum."""
    seed: int = Field(default=42, ge=0)
    """Fixes the order of the rows and which are held out."""
    num_cpu_threads: NumThreads = 1
    """Threads of torch's CPU kernels; on small virtual machines two are slower than one, on large ones try more."""
    evaluation_interval_steps: int = Field(default=100, ge=0)
    """Steps between measurements of the evaluation loss; 0 measures only at the end."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints, from which a killed run goes on; a best evaluation is always saved."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Checkpoints kept on disk, the newest ones, also after the end; while it runs, the best one too. None keeps one
    while it runs, and none once `model/` is written."""
    trainer: FinetuneTrainerSection = FinetuneTrainerSection()
    """The optimizer, and how much is computed at once."""
    monitor: MonitorSection = MonitorSection()
    """Where metrics go."""

    @model_validator(mode="after")
    def _refuse_sampling(self) -> OfflineConfig:
        for key in SAMPLING_KEYS:
            if getattr(self.model, key) != ModelSection.model_fields[key].default:
                raise ValueError(f"model.{key} has no effect on fine-tuning, which samples nothing: leave it out")
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> OfflineConfig:
        if self.eval_dataset is not None and self.eval_fraction > 0:
            raise ValueError("eval_dataset and eval_fraction are both given: one of them names the held-out rows")
        interval, default = (
            self.evaluation_interval_steps,
            OfflineConfig.model_fields["evaluation_interval_steps"].default,
        )
        if self.eval_dataset is None and self.eval_fraction == 0 and interval != default:
            raise ValueError(
                f"evaluation_interval_steps={interval} has no effect without held-out rows: set eval_dataset or "
                "eval_fraction"
            )
        return self


class FinetuneConfig(OfflineConfig):
    """One fine-tuning: which model learns from which conversations, and how."""

    algorithm_type: Literal["sft", "sft_is", "sft_phi"] = "sft"
    """Loss of a token: sft is cross entropy; sft_is and sft_phi weigh it by p and by p (1 - p), p the model's own
    probability of the token, and so tear down less of what a model knows."""

    @model_validator(mode="after")
    def _check_learning_rate(self) -> FinetuneConfig:
        if self.model.lora is None and "learning_rate" not in self.trainer.model_fields_set:
            default = FinetuneTrainerSection.model_fields["learning_rate"].default
            raise ValueError(
                f"trainer.learning_rate must be given when whole weights train: its default {default:g} suits "
                "adapters (model.lora); 2e-5 is usual"
            )
        return self
