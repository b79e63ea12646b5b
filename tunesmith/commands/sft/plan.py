"""Read and validate the rows of a training run and build its batches, before the model loads.

JSON Lines are parsed directly: `datasets` would add the fields of all rows to every row, which gives tool calls the
arguments of other tools as nulls. Rows of other formats are loaded by `datasets`, so their null fields are dropped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.config import ConversationDataSection, OfflineConfig
from tunesmith.errors import DataError, errors_of
from tunesmith.model.load import load_section_tokenizer
from tunesmith.monitor.tracker import check_trackers
from tunesmith.runs.policy import check_trained_model
from tunesmith.runs.workspace import digest_rows
from tunesmith.tasks.data_path import SINGLE_SPLIT
from tunesmith.tasks.load import Row, load_jsonl, load_rows
from tunesmith.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflinePlan:
    """The data of a training run: samples, held-out samples and batches."""

    tokenizer: PreTrainedTokenizerBase
    samples: list[Sample]
    eval_samples: list[Sample]
    num_dropped_rows: int
    epochs: list[list[list[Sample]]]
    """The batches of each epoch."""
    max_steps: int | None = None
    """Number of batches to train; None trains all."""
    sources: Mapping[str, str | None] = field(default_factory=dict)
    """Digest of the rows of each data set, by its key; a resumed training must have the same."""

    @property
    def progress(self) -> list[float]:
        """Fractional epochs completed after each step."""
        completed = [
            epoch + (index + 1) / len(batches)
            for epoch, batches in enumerate(self.epochs)
            for index in range(len(batches))
        ]
        return completed[: self.max_steps]

    @property
    def batches(self) -> list[list[Sample]]:
        return [batch for epoch in self.epochs for batch in epoch][: self.max_steps]


def build_plan(config: OfflineConfig, build_reader: Callable[..., ConversationReader] | None = None) -> OfflinePlan:
    """Run every check that needs no weights, and read the rows."""
    check_trackers(config.monitor.trackers)
    check_trained_model(config.model, config.trainer)
    tokenizer = load_section_tokenizer(config.model)
    reader = (build_reader or ConversationReader)(
        tokenizer, enable_thinking=config.model.enable_thinking, split_special_tokens=config.model.split_special_tokens
    )
    samples, num_dropped, digest = read_samples(reader, config, "train_dataset")
    sources = {"train_dataset": digest}
    if config.eval_dataset is None:
        samples, eval_samples = hold_out_rows(samples, config)
    else:
        eval_samples, num_more, sources["eval_dataset"] = read_samples(reader, config, "eval_dataset")
        num_dropped += num_more
    return OfflinePlan(
        tokenizer=tokenizer,
        samples=samples,
        eval_samples=eval_samples,
        num_dropped_rows=num_dropped,
        epochs=build_epochs(samples, config),
        max_steps=config.max_steps,
        sources=sources,
    )


def read_samples(reader: ConversationReader, config: OfflineConfig, knob: str) -> tuple[list[Sample], int, str | None]:
    """Samples of the data set `knob`, the number of rows dropped as too long, and the digest of all rows."""
    section, max_model_len = getattr(config, knob), config.model.max_model_len
    with errors_of(knob):
        rows = load_conversation_rows(section)
        samples = reader.read(rows, max_model_len=max_model_len, drops_long_rows=config.long_rows == "drop")
        if not samples:
            raise DataError(
                f"every row of {', '.join(section.paths)} is longer than model.max_model_len={max_model_len}: "
                "no row is left to train on"
            )
    return samples, len(rows) - count_rows(samples), digest_rows(rows)


def digest_sources(config: OfflineConfig) -> dict[str, str | None]:
    """The digest of each data set as in `OfflinePlan.sources`; None for one that can no longer be read."""
    sources: dict[str, str | None] = {}
    for knob, section in (("train_dataset", config.train_dataset), ("eval_dataset", config.eval_dataset)):
        if section is not None:
            try:
                sources[knob] = digest_rows(load_conversation_rows(section))
            except DataError:
                sources[knob] = None
    return sources


def hold_out_rows(samples: Sequence[Sample], config: OfflineConfig) -> tuple[list[Sample], list[Sample]]:
    """Split samples into training samples and held-out samples; rows with one prompt stay together.

    `eval_fraction` is the largest share of the rows that is held out. If the rows of each prompt are more than that, as
    with one instruction for all rows, they are split one by one.
    """
    prompts = group_by_prompt(samples)
    rows = sorted(row for prompt in prompts for row in prompt)
    held_out = choose_rows(rows, config.eval_fraction, seed=config.seed)
    if len(prompts) < len(rows):
        held_out = choose_prompts(prompts, len(held_out), seed=config.seed) or held_out
    return (
        [sample for sample in samples if sample.group_index not in held_out],
        [sample for sample in samples if sample.group_index in held_out],
    )


def choose_prompts(prompts: Sequence[Sequence[int]], max_rows: int, *, seed: int) -> set[int]:
    """The rows of random prompts, `max_rows` at most; none if each prompt has more."""
    chosen: set[int] = set()
    for rows in random.Random(f"held-out-{seed}").sample(prompts, len(prompts)):
        if len(chosen) + len(rows) <= max_rows:
            chosen.update(rows)
    return chosen


def group_by_prompt(samples: Sequence[Sample]) -> list[list[int]]:
    """The rows of each prompt: the tokens before the first trained one. A text has none, so its row is alone.

    Several trajectories of one question, as `rft_filter` writes them, would otherwise be on both sides of a split, and
    the loss on held-out rows would fall as the training rows are memorized.
    """
    prompt_of: dict[int, tuple[int, ...]] = {}
    for sample in samples:
        end = next((place for place, is_trained in enumerate(sample.is_sampled) if is_trained), len(sample.token_ids))
        prompt_of.setdefault(sample.group_index, sample.token_ids[:end])
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for row, prompt in sorted(prompt_of.items()):
        groups.setdefault((row if len(prompt) <= 1 else -1, prompt), []).append(row)
    return list(groups.values())


def count_rows(samples: Sequence[Sample]) -> int:
    """Number of rows that the samples come from."""
    return len({sample.group_index for sample in samples})


def build_epochs(samples: Sequence[Sample], config: OfflineConfig) -> list[list[list[Sample]]]:
    """The batches of each epoch, up to `max_steps` batches in whole epochs."""
    epochs: list[list[list[Sample]]] = []
    num_steps = 0
    while len(epochs) < config.num_epochs and (config.max_steps is None or num_steps < config.max_steps):
        epochs.append(build_batches(samples, config, epoch=len(epochs)))
        num_steps += len(epochs[-1])
    return epochs


def build_batches(samples: Sequence[Sample], config: OfflineConfig, *, epoch: int) -> list[list[Sample]]:
    """The batches of one epoch: shuffled whole rows, up to `max_tokens_per_batch` and `max_rows_per_batch` each."""
    rows: dict[int, list[Sample]] = {}
    for sample in samples:
        rows.setdefault(sample.group_index, []).append(sample)
    order = list(rows.values())
    if config.has_shuffling:
        random.Random(f"{config.seed}-{epoch}").shuffle(order)
    max_rows = config.max_rows_per_batch or len(order)
    batches: list[list[Sample]] = []
    num_tokens = num_rows = 0
    for row in order:
        length = sum(len(sample.token_ids) for sample in row)
        if not batches or num_rows == max_rows or num_tokens + length > config.max_tokens_per_batch:
            batches.append([])
            num_tokens = num_rows = 0
        batches[-1] += row
        num_tokens += length
        num_rows += 1
    return batches


def load_conversation_rows(section: ConversationDataSection) -> list[Row]:
    """All rows of a section's paths, in order."""
    rows: list[Row] = []
    for path in section.paths:
        root = Path(path).expanduser()  # a JSON Lines file, or a folder that may have one of the split
        file = root if root.suffix == ".jsonl" else root / f"{section.split}.jsonl"
        is_split = file != root or section.split in {None, SINGLE_SPLIT, file.stem}
        if file.is_file() and is_split and section.name is None:
            rows += load_jsonl(file)
        else:  # which refuses a name or split that the file does not have
            rows += map(drop_empty_fields, load_rows(path, name=section.name, split=section.split))
    if not rows:
        raise DataError(f"there are no rows to train on in {', '.join(section.paths)}")
    return rows


def drop_empty_fields(value: Any) -> Any:
    """Remove fields that are None from nested objects."""
    if isinstance(value, dict):
        return {key: drop_empty_fields(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [drop_empty_fields(inner) for inner in value]
    return value


def choose_rows(rows: Sequence[int], fraction: float, *, seed: int) -> set[int]:
    """Random rows to hold out; a fraction above 0 holds out at least one."""
    if fraction == 0:
        return set()
    count = max(1, round(fraction * len(rows)))
    if count >= len(rows):
        raise DataError(f"eval_fraction={fraction:g} of {len(rows)} rows leaves none to train on")
    return set(random.Random(f"held-out-{seed}").sample(rows, count))
