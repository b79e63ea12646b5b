"""Knobs of preference training (`tunesmith prefer`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from tunesmith.config.model import refuse_dropout
from tunesmith.config.section import LearningRate
from tunesmith.config.sft import NOTHING_SAMPLED, OfflineConfig, SftTrainerSection


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
    def _check_dropout(self) -> PreferenceConfig:
        refuse_dropout(self.model.lora, "preference training compares logprobs of different forward passes")
        return self

    @model_validator(mode="after")
    def _check_batches(self) -> PreferenceConfig:
        if self.algorithm_type == "kto" and self.max_rows_per_batch == 1:
            raise ValueError(
                "max_rows_per_batch=1: kto pairs prompts with completions of other rows and needs at least 2"
            )
        return self
