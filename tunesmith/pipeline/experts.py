"""Demonstrations of experts for the steps of a reinforcement-learning run.

They are read and tokenised once, before a model loads. Which of them a step trains depends on the seed and the number
of the step alone, so a resumed run goes on with the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from tunesmith.config import DemonstrationSection, ExpertSection
from tunesmith.pipeline.demonstration_rows import load_demonstrations
from tunesmith.pipeline.demonstrations import DemonstrationReader
from tunesmith.types import Sample

ROUNDING = 1e-9
"""Counts that a fraction misses by less are whole."""


class ExpertFeed:
    """Hands out whole demonstrations; each pass over them has an order of its own."""

    def __init__(self, demonstrations: Sequence[Sequence[Sample]], *, num_per_step: int, seed: int) -> None:
        self._demonstrations = demonstrations
        self._num_per_step = num_per_step
        self._seed = seed

    def draw(self, step: int) -> list[Sample]:
        """The samples of step 1, 2, ...; groups and trajectories count from 0."""
        first = (step - 1) * self._num_per_step
        places = [divmod(place, len(self._demonstrations)) for place in range(first, first + self._num_per_step)]
        orders = {epoch: self._shuffle(epoch) for epoch in {epoch for epoch, _ in places}}
        drawn = [self._demonstrations[orders[epoch][offset]] for epoch, offset in places]
        return [
            replace(sample, group_index=index, trajectory_index=index)
            for index, demonstration in enumerate(drawn)
            for sample in demonstration
        ]

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._demonstrations)))
        random.Random(f"experts-{self._seed}-{epoch}").shuffle(order)
        return order


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
