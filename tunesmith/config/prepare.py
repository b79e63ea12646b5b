"""Every knob of preparing data (`tunesmith prepare`)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from tunesmith.config.model import ModelSection
from tunesmith.config.run import EngineSection, RolloutSection
from tunesmith.config.section import NumThreads, Section, Temperature

FIELD_NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


class SourceSection(Section):
    """Questions with worked solutions."""

    path: str
    """Folder of jsonl, json, csv or parquet files, one such file, or a hub id."""
    name: str | None = None
    """Configuration of a data set that has several; `main` for openai/gsm8k."""
    split: str | None = None
    """Which split to read; None takes train, or test for `eval_data`, and all of a file."""


class ContaminationSection(Section):
    """The gate that keeps questions of the evaluation set out of the training set."""

    action: Literal["drop", "error", "ignore"] = "drop"
    """What becomes of a training row that says what an evaluation row says: drop leaves it out and counts it, error
    stops before anything is written, ignore lets it through and counts it all the same."""
    ngram_words: int = Field(default=13, ge=3)
    """Rows overlap when they share so many words in a row, whatever case, spacing and punctuation; lower it to be
    stricter. An evaluation question of fewer words counts whole."""


class ParaphraseSection(Section):
    """More training questions, in the words of a model."""

    base_url: str
    """URL of an OpenAI-compatible server, with its `/v1`."""
    model: str
    """The model's name at that server."""
    num_variants: int = Field(default=1, ge=1)
    """Rewritten questions for each row; those that lose a number are refused and counted."""
    api_key_env: str | None = None
    """Environment variable that holds the server's key; None sends a placeholder."""
    temperature: Temperature = 1.0
    """Sampling temperature of the rewriting."""
    max_tokens: int = Field(default=1024, ge=1)
    """Most tokens of a rewritten question."""
    max_concurrency: int = Field(default=8, ge=1)
    """Requests that the server gets at once; raise it for a server that batches many."""


class TriedModelSection(ModelSection):
    """A model that tries the questions."""

    max_model_len: int = Field(default=2048, ge=2)
    """Longest conversation in tokens, prompt and answers together."""
    max_tokens: int = Field(default=512, ge=1)
    """Most tokens one model call may sample."""


class PassRateSection(Section):
    """How often models solve each training question: columns for selectors that go by difficulty."""

    models: dict[str, TriedModelSection] = Field(min_length=1)
    """Models to try by the name of their column, which gets `_pass_rate` after it."""
    num_samples: int = Field(default=8, ge=1)
    """Runs of the agent on each question."""
    batch_size: int = Field(default=64, ge=1)
    """Questions tried at once; a kill loses one batch."""
    engine: EngineSection = EngineSection()
    """The sampler."""
    rollout: RolloutSection = RolloutSection()
    """How runs of the agent go."""

    @model_validator(mode="after")
    def _check_names(self) -> PassRateSection:
        for name in self.models:
            if not FIELD_NAME.fullmatch(name):
                raise ValueError(f"models.{name} must be letters, digits, '.', '_', '+' or '-', for it names a column")
        return self


class TokensSection(Section):
    """How long conversations are for a model."""

    model: str
    """Folder or hub id of the model whose tokenizer and chat template count; no weights are read."""
    chat_template: str | None = None
    """Path of a jinja file to use in place of the tokenizer's own chat template."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longer training rows, in tokens, are dropped and counted; None keeps all."""
    trust_remote_code: bool = False
    """Run code that comes with the tokenizer; set only for sources you trust."""


class PrepareSection(Section):
    """What is prepared: agent conversations from questions with worked solutions, as GSM8K writes them."""

    data: SourceSection
    """The training questions."""
    eval_data: SourceSection | None = None
    """The held-out questions, which nothing else is trained on; every one with a readable answer is kept."""
    question_field: str = "question"
    """Field that holds the question."""
    answer_field: str = "answer"
    """Field that holds the worked solution, with `<<48/2=24>>` at its calculations and `#### 72` at its end."""
    max_rows: int | None = Field(default=None, ge=1)
    """Only the first so many rows of each set, for a try; None takes all."""
    style: Literal["all", "last"] = "all"
    """Which calculations of a solution become calls of the calculator: every one, or the last."""
    contamination: ContaminationSection = ContaminationSection()
    """The gate between training and evaluation questions."""
    paraphrase: ParaphraseSection | None = None
    """Adds training questions in other words; None adds none."""
    pass_rate: PassRateSection | None = None
    """Adds columns with pass rates of models; None adds none."""
    tokens: TokensSection | None = None
    """Measures lengths for a model, and drops what is too long; None measures nothing."""
    seed: int = Field(default=42, ge=0)
    """Fixes every token that pass rates sample on a CPU."""
    num_cpu_threads: NumThreads = 1
    """Threads of torch's CPU kernels; on small virtual machines two are slower than one, on large ones try more."""

    @model_validator(mode="after")
    def _check_gate(self) -> PrepareSection:
        if self.eval_data is None and "contamination" in self.model_fields_set:
            raise ValueError("contamination has no effect without eval_data: name the held-out set, or leave it out")
        return self
