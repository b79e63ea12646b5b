"""Knobs of supervised fine-tuning (`tunesmith sft`) and of preference training (`tunesmith prefer`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tunesmith.config.algorithm import AlgorithmSection
from tunesmith.config.callbacks import PatienceSection
from tunesmith.config.model import ModelSection, refuse_dropout
from tunesmith.config.run import MonitorSection, TrainerSection
from tunesmith.config.section import LearningRate, Needs, NumThreads, Section, Unused

HELD_OUT = Needs("eval_dataset", reason="there are no held-out rows") | Needs("eval_fraction", above=0)
NOTHING_SAMPLED = Unused(("num_minibatches", "routing_replay", "mismatch_warn", "mismatch_stop"), "nothing is sampled")
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
    evaluation_interval_steps: Annotated[int, HELD_OUT] = Field(default=100, ge=0)
    """Steps between computations of the evaluation loss; 0 computes it only at the end."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints for resuming; the weights of a new best evaluation are always saved."""
    save_interval_s: float | None = Field(default=300.0, gt=0)
    """Seconds after which the end of a step saves a checkpoint, counted from the one before; null saves by steps
    only."""
    keep_checkpoints: int | None = Field(default=None, ge=1)
    """Number of newest checkpoints kept on disk, also after the end; during training the best one is kept too. null
    keeps 1 during training and 0 once `model/` is written."""
    early_stopping: Annotated[
        PatienceSection | None, HELD_OUT, Needs("evaluation_interval_steps", above=0, reason="it compares evaluations")
    ] = None
    """End once the evaluation loss no longer falls; null trains all steps. The learning rate schedule is that of all
    steps."""
    trainer: Annotated[SftTrainerSection, NOTHING_SAMPLED] = SftTrainerSection()
    """Optimizer, memory and speed."""
    monitor: MonitorSection = MonitorSection()
    """Trackers and console output."""

    @property
    def algorithm(self) -> AlgorithmSection:
        """The algorithm and its arguments, as in a run file."""
        return AlgorithmSection(**self.model_dump(include={"algorithm_type", "terms_args"}))

    @model_validator(mode="after")
    def _check_evaluation(self) -> OfflineConfig:
        if self.eval_dataset is not None and self.eval_fraction > 0:
            raise ValueError("eval_dataset and eval_fraction are both given: set only one of them")
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


class PreferenceTrainerSection(SftTrainerSection):
    """Optimizer, memory and speed of preference training."""

    learning_rate: LearningRate = 1e-6
    """Peak learning rate of AdamW; the default suits full weights of large models, about 1e-5 suits adapters."""
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Warm-up as a share of all steps, if `warmup_steps` is 0."""


class PreferenceConfig(OfflineConfig):
    """Preference training: like supervised fine-tuning; dpo and kto also load a frozen copy of the starting model."""

    algorithm_type: Literal["dpo", "kto", "orpo", "simpo"] = "dpo"
    """dpo, orpo and simpo train on pairs: rows with `prompt`, `chosen` and `rejected`. kto trains on labeled
    completions: rows with `prompt`, `completion` and `label`, true for a desirable completion. orpo and simpo have no
    reference model: choose orpo to learn from the chosen completions too, simpo after fine-tuning."""
    terms_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments that differ from the algorithm's defaults: for dpo and kto `beta`, lower to allow a larger distance
    from the starting model; for dpo also `loss_type` (sigmoid, ipo, hinge, robust) and `label_smoothing`, the share of
    pairs assumed to be swapped; for kto `desirable_weight` and `undesirable_weight`, to balance unequal numbers of
    labels; for orpo `odds_coef`; for simpo `beta` and the margin `gamma`."""
    trainer: Annotated[PreferenceTrainerSection, NOTHING_SAMPLED] = PreferenceTrainerSection()
    """Optimizer, memory and speed."""

    @model_validator(mode="after")
    def _check_knobs(self) -> PreferenceConfig:
        refuse_dropout(self.model.lora, "preference training compares logprobs of different forward passes")
        if self.algorithm_type == "kto" and self.max_rows_per_batch == 1:
            raise ValueError(
                "max_rows_per_batch=1: kto pairs prompts with completions of other rows and needs at least 2"
            )
        return self
