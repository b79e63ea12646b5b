"""What is known of a fine-tuning before its model loads: rows, samples and batches, all of them checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from tunesmith.config import DemonstrationSection, OfflineConfig
from tunesmith.errors import DataError
from tunesmith.model.load import load_section_tokenizer
from tunesmith.monitor.trackers import check_trackers
from tunesmith.pipeline.data.conversation_rows import Row, hold_out, load_demonstrations
from tunesmith.pipeline.data.conversations import DemonstrationReader
from tunesmith.pipeline.session.policy import check_trained
from tunesmith.types import Sample


class RowReader(Protocol):
    """Turns rows into samples whose `group_index` counts the rows that are kept."""

    def read(self, rows: Sequence[Row], *, max_model_len: int, drops_long_rows: bool) -> list[Sample]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetunePlan:
    """What is known before a model loads."""

    tokenizer: PreTrainedTokenizerBase
    samples: list[Sample]
    eval_samples: list[Sample]
    num_dropped_rows: int
    epochs: list[list[list[Sample]]]
    """The batches of each epoch."""
    max_steps: int | None = None
    """How many of the batches are trained; None is all."""

    @property
    def progress(self) -> list[float]:
        """Epochs that have passed after each step."""
        whole = [
            epoch + (index + 1) / len(batches)
            for epoch, batches in enumerate(self.epochs)
            for index in range(len(batches))
        ]
        return whole[: self.max_steps]

    @property
    def batches(self) -> list[list[Sample]]:
        """What each step trains."""
        return [batch for epoch in self.epochs for batch in epoch][: self.max_steps]

    @property
    def num_last_epoch_steps(self) -> int:
        """Steps of the epoch that the last step belongs to."""
        num_steps = len(self.batches)
        for epoch in self.epochs:
            if num_steps <= len(epoch):
                break
            num_steps -= len(epoch)
        return num_steps


def build_plan(config: OfflineConfig, build_reader: Callable[..., RowReader] = DemonstrationReader) -> FinetunePlan:
    """Check everything that needs no weights, and read the rows."""
    check_trackers(config.monitor.trackers)
    check_trained(config.model, config.trainer)
    tokenizer = load_section_tokenizer(config.model)
    reader = build_reader(
        tokenizer,
        enable_thinking=config.model.enable_thinking,
        split_special_tokens=config.model.split_special_tokens,
    )
    samples, num_dropped = read_samples(reader, config.train_dataset, config)
    if config.eval_dataset is None:
        samples, eval_samples = hold_out_rows(samples, config)
    else:
        eval_samples, num_more = read_samples(reader, config.eval_dataset, config)
        num_dropped += num_more
    return FinetunePlan(
        tokenizer=tokenizer,
        samples=samples,
        eval_samples=eval_samples,
        num_dropped_rows=num_dropped,
        epochs=build_epochs(samples, config),
        max_steps=config.max_steps,
    )


def read_samples(reader: RowReader, section: DemonstrationSection, config: OfflineConfig) -> tuple[list[Sample], int]:
    """Samples of a data set, and how many rows were left out as too long."""
    rows = load_demonstrations(section)
    max_model_len = config.model.max_model_len
    samples = reader.read(rows, max_model_len=max_model_len, drops_long_rows=config.long_rows == "drop")
    if not samples:
        raise DataError(
            f"every row of {', '.join(section.paths)} is longer than model.max_model_len={max_model_len}: "
            "nothing is left to learn from"
        )
    return samples, len(rows) - count_rows(samples)


def hold_out_rows(samples: Sequence[Sample], config: OfflineConfig) -> tuple[list[Sample], list[Sample]]:
    """Samples to learn from, and those of rows that are held out."""
    rows = sorted({sample.group_index for sample in samples})
    held_out = set(hold_out(rows, config.eval_fraction, seed=config.seed)[1])
    return (
        [sample for sample in samples if sample.group_index not in held_out],
        [sample for sample in samples if sample.group_index in held_out],
    )


def count_rows(samples: Sequence[Sample]) -> int:
    """How many rows the samples come from."""
    return len({sample.group_index for sample in samples})


def build_epochs(samples: Sequence[Sample], config: OfflineConfig) -> list[list[list[Sample]]]:
    """The batches of all epochs that have a step."""
    epochs: list[list[list[Sample]]] = []
    num_steps = 0
    while len(epochs) < config.num_epochs and (config.max_steps is None or num_steps < config.max_steps):
        epochs.append(build_batches(samples, config, epoch=len(epochs)))
        num_steps += len(epochs[-1])
    return epochs


def build_batches(samples: Sequence[Sample], config: OfflineConfig, *, epoch: int) -> list[list[Sample]]:
    """The batches of an epoch: in an order of its own, each filled to its number of tokens or rows, rows whole."""
    rows: dict[int, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.group_index, []).append(sample)
    order = list(rows.values())
    if config.has_shuffling:
        random.Random(f"{config.seed}-{epoch}").shuffle(order)
    most_rows = config.max_rows_per_batch or len(order)
    batches: list[list[Sample]] = []
    num_tokens = num_rows = 0
    for row in order:
        length = sum(len(sample.token_ids) for sample in row)
        if not batches or num_rows == most_rows or num_tokens + length > config.max_tokens_per_batch:
            batches.append([])
            num_tokens = num_rows = 0
        batches[-1] += row
        num_tokens += length
        num_rows += 1
    return batches
