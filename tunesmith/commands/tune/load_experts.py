"""Read and tokenize the expert demonstrations of a reinforcement-learning run."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from tunesmith.commands.sft.conversation_rows import load_conversation_rows
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.config import ConversationDataSection, ExpertSection
from tunesmith.experience.expert_feed import ExpertFeed

ROUNDING = 1e-9
"""Tolerance for floating-point error before rounding a count up."""


def load_expert_feed(
    section: ExpertSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    enable_thinking: bool | None,
    split_special_tokens: bool,
    max_model_len: int,
    num_runs: int,
    seed: int,
) -> ExpertFeed:
    """Read the demonstrations that are mixed with `num_runs` rollouts per step."""
    rows = load_conversation_rows(ConversationDataSection(path=section.path, name=section.name, split=section.split))
    reader = ConversationReader(tokenizer, enable_thinking=enable_thinking, split_special_tokens=split_special_tokens)
    samples = [replace(sample, is_expert=True) for sample in reader.read(rows, max_model_len=max_model_len)]
    demonstrations = [list(row_samples) for _, row_samples in groupby(samples, key=lambda sample: sample.group_index)]
    num_per_step = math.ceil(section.ratio / (1 - section.ratio) * num_runs - ROUNDING)
    return ExpertFeed(demonstrations, num_per_step=num_per_step, seed=seed)
