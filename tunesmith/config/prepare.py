"""Knobs of data preparation (`tunesmith prepare`)."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tunesmith.config.engine import EngineSection
from tunesmith.config.model import ModelSection
from tunesmith.config.rollout import RolloutSection
from tunesmith.config.section import DataSection, Needs, NumThreads, Section, Temperature

FIELD_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


class SourceSection(DataSection):
    """A data set of questions with worked solutions."""

    name: str | None = None
    """Configuration (subset) of a data set that has several; `main` for openai/gsm8k."""
    split: str | None = None
    """Split to read; null uses train, or test for `eval_data`, and all rows of a file."""


class ContaminationSection(Section):
    """Check that keeps evaluation questions out of the training set."""

    action: Literal["drop", "error", "ignore"] = "drop"
    """Handling of a training row that overlaps an evaluation row: drop removes and counts it, error stops before
    anything is written, ignore keeps and counts it."""
    ngram_words: int = Field(default=13, ge=3)
    """Consecutive words that two rows must share to overlap, ignoring case, spacing and punctuation; lower it to be
    stricter. A shorter evaluation question is matched as a whole."""


class ParaphraseSection(Section):
    """Additional training questions, paraphrased by a model."""

    base_url: str
    """URL of an OpenAI-compatible server, including `/v1`."""
    model: str
    """Model name on that server."""
    num_variants: int = Field(default=1, ge=1)
    """Paraphrases per row; those that lose a number are rejected and counted."""
    api_key_env: str | None = None
    """Environment variable with the server's API key; null sends a placeholder."""
    temperature: Temperature = 1.0
    """Sampling temperature of paraphrases."""
    max_tokens: int = Field(default=1024, ge=1)
    """Maximum tokens of a paraphrase."""
    max_concurrency: int = Field(default=8, ge=1)
    """Maximum concurrent requests; raise it for a server that batches many."""


class PassRateModelSection(ModelSection):
    """A model whose pass rates are measured."""

    max_model_len: int = Field(default=2048, ge=2)
    """Maximum context length in tokens, prompt and completions together."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens per model call."""


class PassRateSection(Section):
    """Pass rates of models on each training question, as columns for difficulty-based selectors."""

    models: dict[str, PassRateModelSection] = Field(min_length=1)
    """Name -> model; the column is called `<name>_pass_rate`."""
    num_samples: int = Field(default=8, ge=1)
    """Rollouts of the agent per question; raise it for more precise pass rates."""
    batch_size: int = Field(default=64, ge=1)
    """Questions per batch; results are saved after each batch, so an interruption loses one."""
    engine: EngineSection = EngineSection()
    """Sampling engine."""
    rollout: RolloutSection = RolloutSection()
    """Execution of the agent."""

    @model_validator(mode="after")
    def _check_names(self) -> PassRateSection:
        for name in self.models:
            if not FIELD_NAME.fullmatch(name):
                raise ValueError(
                    f"models.{name} must consist of letters, digits, '.', '_', '+' or '-': it names a column"
                )
        return self


class TokensSection(Section):
    """Token lengths of conversations for a model."""

    model: str
    """Folder or hub id of the model whose tokenizer and chat template are used; no weights are read."""
    chat_template: str | None = None
    """Path of a Jinja file that replaces the tokenizer's chat template."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of a training row; longer ones are dropped and counted. null keeps all."""
    trust_remote_code: bool = False
    """Execute Python code that comes with the tokenizer. Enable it only for sources you trust."""


class PrepareSection(Section):
    """Agent conversations built from questions with worked solutions in the format of GSM8K."""

    data: SourceSection
    """Training questions."""
    eval_data: SourceSection | None = None
    """Held-out questions; every one with a readable answer is kept."""
    question_field: str = "question"
    """Field of the question."""
    answer_field: str = "answer"
    """Field of the worked solution, with `<<48/2=24>>` at its calculations and `#### 72` at its end."""
    max_rows: int | None = Field(default=None, ge=1)
    """Maximum number of rows of each set, the first ones, for a trial; null uses all."""
    style: Literal["all", "last"] = "all"
    """Calculations of a solution that become calculator calls: all, or only the last."""
    contamination: Annotated[ContaminationSection, Needs("eval_data")] = ContaminationSection()
    """Contamination check between training and evaluation questions."""
    paraphrase: ParaphraseSection | None = None
    """Paraphrasing of training questions; null adds none."""
    pass_rate: PassRateSection | None = None
    """Pass-rate columns; null adds none."""
    tokens: TokensSection | None = None
    """Token lengths and length filter; null measures nothing."""
    seed: int = Field(default=42, ge=0)
    """Random seed of the rollouts that measure pass rates."""
    num_cpu_threads: NumThreads = 1
    """Threads of torch's CPU kernels. On small virtual machines 2 are slower than 1; on machines with many cores try
    more."""
