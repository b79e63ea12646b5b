"""Every knob of learning from preferences (`tunesmith prefer`)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from tunesmith.config.finetune import FinetuneTrainerSection, OfflineConfig
from tunesmith.config.lora import refuse_dropout
from tunesmith.config.section import LearningRate


class PreferenceTrainerSection(FinetuneTrainerSection):
    """How a batch of preferences becomes an update."""

    learning_rate: LearningRate = 1e-6
    """Peak learning rate of AdamW; the default suits whole weights of large models, adapters take about 1e-5."""
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Share of all steps over which the learning rate rises from 0, where `warmup_steps` is 0."""


class PreferenceConfig(OfflineConfig):
    """One training on preferences: as a fine-tuning, with a frozen copy of the starting model to compare with."""

    algorithm_type: Literal["dpo", "kto"] = "dpo"
    """dpo learns from pairs, rows with `prompt`, `chosen` and `rejected`; kto from single judgements, rows with
    `prompt`, `completion` and a `label` that is true where the completion is desirable."""
    terms_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments that differ from the algorithm's defaults: `beta`, lower to move further from the starting model, and
    of kto `desirable_weight` and `undesirable_weight`, to balance unequal numbers. Unknown ones are errors."""
    trainer: PreferenceTrainerSection = PreferenceTrainerSection()
    """The optimizer, and how much is computed at once."""

    @model_validator(mode="after")
    def _check_dropout(self) -> PreferenceConfig:
        refuse_dropout(self.model.lora, "preferences compare the model with what it was at the start")
        return self

    @model_validator(mode="after")
    def _check_batches(self) -> PreferenceConfig:
        if self.algorithm_type == "kto" and self.max_rows_per_batch == 1:
            raise ValueError("max_rows_per_batch=1: kto compares completions with prompts of other rows, so at least 2")
        return self
