"""Supervised fine-tuning: the trainer of reinforcement learning on replies that are given instead of sampled.

Rows of messages become samples whose assistant tokens train; batches are filled to a number of tokens. The result is a
folder that transformers loads, written under a temporary name and renamed.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config import AlgorithmSection, ModelSection, MonitorSection, TrainerSection
from tunesmith.errors import DataError, StorageError
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.load import (
    check_model,
    check_vocabulary,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from tunesmith.monitor.monitor import Monitor
from tunesmith.pipeline.demonstrations import DemonstrationReader
from tunesmith.storage import storage_errors, sync_tree
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneSettings:
    """How demonstrations are learned."""

    num_epochs: int = 1
    """Passes over the rows."""
    max_tokens_per_batch: int = 16384
    """Tokens of one update; a longer sample is a batch of its own."""
    seed: int = 42
    """Fixes the order of the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneResult:
    """What fine-tuning leaves."""

    folder: Path
    num_steps: int
    loss: float
    """Mean over the last epoch's batches."""


def run_finetuning(
    rows: Sequence[Mapping[str, Any]],
    *,
    out_dir: str | Path,
    model: ModelSection,
    trainer: TrainerSection,
    settings: FinetuneSettings,
    monitor: MonitorSection,
) -> FinetuneResult:
    """Train the model of `model.path` on rows of `messages` (and `tools`), and write it to `out_dir`."""
    folder = Path(out_dir)
    if folder.exists():
        raise StorageError(f"{str(folder)!r} is there already; choose another folder for the fine-tuned model")
    check_model(model.path, max_model_len=model.max_model_len, trust_remote_code=model.trust_remote_code)
    tokenizer = load_tokenizer(model.path, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code)
    samples = DemonstrationReader(tokenizer).read(rows, max_model_len=model.max_model_len)
    if not samples:
        raise DataError("there are no rows to fine-tune on")
    batches = build_batches(samples, settings)
    device = resolve_device(model.device)
    module = load_model(
        model.path,
        dtype=resolve_dtype(model.dtype, device),
        device=device,
        trust_remote_code=model.trust_remote_code,
    )
    check_vocabulary(module, tokenizer)
    learner = Trainer(
        module,
        trainer,
        AlgorithmSection(algorithm_type="sft"),
        max_model_len=model.max_model_len,
        num_total_steps=len(batches),
    )
    temporary = folder.with_name(f".{folder.name}.tmp")
    with storage_errors(folder, "write"):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        losses = train(learner, batches, root=temporary, monitor=monitor)
        save_model_files(temporary, module, tokenizer)
        sync_tree(temporary)
        temporary.rename(folder)
    num_last = max(1, len(losses) // settings.num_epochs)
    return FinetuneResult(folder=folder, num_steps=len(losses), loss=sum(losses[-num_last:]) / num_last)


def build_batches(samples: Sequence[Sample], settings: FinetuneSettings) -> list[list[Sample]]:
    """All batches of all epochs: each epoch in an order of its own, each batch filled to its number of tokens."""
    batches: list[list[Sample]] = []
    for epoch in range(settings.num_epochs):
        order = list(samples)
        random.Random(f"{settings.seed}-{epoch}").shuffle(order)
        num_tokens = 0
        batches.append([])
        for sample in order:
            if batches[-1] and num_tokens + len(sample.token_ids) > settings.max_tokens_per_batch:
                batches.append([])
                num_tokens = 0
            batches[-1].append(sample)
            num_tokens += len(sample.token_ids)
    return batches


def train(learner: Trainer, batches: Sequence[Sequence[Sample]], *, root: Path, monitor: MonitorSection) -> list[float]:
    """One update a batch; return their losses."""
    losses = []
    with Monitor(root, monitor, total_steps=len(batches)) as screen:
        for step, batch in enumerate(batches, start=1):
            started = time.perf_counter()
            metrics = learner.step(batch)
            metrics["perf/train_s"] = time.perf_counter() - started
            screen.log(step, "train", metrics)
            losses.append(metrics["train/loss"])
    return losses
