"""Expert demonstrations of a reinforcement-learning run, read and tokenized before a model loads."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from tunesmith.config import DemonstrationSection, ExpertSection
from tunesmith.experience.expert_feed import ExpertFeed
from tunesmith.pipeline.data.conversation_rows import load_demonstrations
from tunesmith.pipeline.data.conversations import DemonstrationReader

ROUNDING = 1e-9
"""Counts that a fraction misses by less are whole."""


def build_experts(
    section: ExpertSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    enable_thinking: bool | None,
    split_special_tokens: bool,
    max_model_len: int,
    num_runs: int,
    seed: int,
) -> ExpertFeed:
    """Read the demonstrations that are trained beside `num_runs` rollouts a step."""
    rows = load_demonstrations(DemonstrationSection(path=section.path, name=section.name, split=section.split))
    reader = DemonstrationReader(tokenizer, enable_thinking=enable_thinking, split_special_tokens=split_special_tokens)
    samples = [replace(sample, is_expert=True) for sample in reader.read(rows, max_model_len=max_model_len)]
    demonstrations = [list(of_row) for _, of_row in groupby(samples, key=lambda sample: sample.group_index)]
    num_per_step = math.ceil(section.ratio / (1 - section.ratio) * num_runs - ROUNDING)
    return ExpertFeed(demonstrations, num_per_step=num_per_step, seed=seed)
