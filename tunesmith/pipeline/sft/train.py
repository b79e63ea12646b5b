"""Supervised fine-tuning: the trainer of reinforcement learning on replies that are given instead of sampled.

Rows of messages become samples whose assistant tokens train; batches are filled to a number of tokens. All that can be
wrong with settings, rows and files is found before weights are read. The folder goes on where a killed run was; what it
leaves is `model/`, the weights of the best evaluation loss, or the last ones where nothing is held out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tunesmith.config import AlgorithmSection, FinetuneConfig, OfflineConfig
from tunesmith.errors import TrainingError
from tunesmith.model.checkpoint import estimate_checkpoint_bytes, load_checkpoint, save_checkpoint
from tunesmith.model.cpu_threads import set_num_threads
from tunesmith.model.load import check_vocabulary, load_section_model
from tunesmith.monitor.monitor import Monitor
from tunesmith.pipeline.sft.folder import (
    MODEL,
    FinetuneFolder,
    finish,
    load_figures,
    open_finetune_folder,
    remove_checkpoints,
)
from tunesmith.pipeline.sft.plan import FinetunePlan, build_plan, count_rows
from tunesmith.storage import check_free_space
from tunesmith.trainer.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneResult:
    """What fine-tuning leaves."""

    folder: Path
    """The model or adapter: a path that `model.path` takes."""
    num_steps: int
    loss: float
    """Mean over the last epoch's batches, in nats a token."""
    eval_loss: float | None
    """Of the weights that were kept; None where nothing is held out."""
    best_step: int
    """The step whose weights were kept."""
    num_rows: int
    """Rows that were learned from."""
    num_eval_rows: int
    num_dropped_rows: int
    """Rows that were longer than the model's context."""
    num_trained_tokens: int
    """Assistant tokens in one epoch."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a fine-tuning is; the state that a checkpoint keeps beside the trainer's."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    best_step: int | None = None
    best_loss: float | None = None


def run_sft(config: FinetuneConfig, *, out_dir: Path) -> FinetuneResult:
    """Fine-tune into `out_dir`, going on where a killed run of the same settings was; raises when it fails."""
    algorithm = AlgorithmSection(algorithm_type=config.algorithm_type)
    return run_offline(
        config,
        out_dir=out_dir,
        build_plan=partial(build_plan, config),
        build_learner=partial(build_learner, config, algorithm),
    )


def run_offline(
    config: OfflineConfig,
    *,
    out_dir: Path,
    build_plan: Callable[[], FinetunePlan],
    build_learner: Callable[[PreTrainedModel, int], Trainer],
) -> FinetuneResult:
    """As `run_sft`, with any plan, and any learner for a model and a number of steps."""
    root = Path(out_dir).expanduser().absolute()
    figures = load_figures(root, config)
    if figures is not None:
        return FinetuneResult(folder=root / MODEL, **figures)
    set_num_threads(config.num_cpu_threads)
    plan = build_plan()
    with (
        open_finetune_folder(config, root) as folder,
        Monitor(
            root,
            config.monitor,
            total_steps=len(plan.batches),
            committed_step=folder.committed_step,
            run_settings=config.model_dump(mode="json"),
        ) as monitor,
    ):
        model = load_section_model(config.model)
        check_vocabulary(model, plan.tokenizer)
        learner = build_learner(model, len(plan.batches))
        check_free_space(root, estimate_checkpoint_bytes(model, learner.state_dict()))
        progress = train(config, plan, model, learner, folder, monitor)
        assert progress.best_step is not None
        figures = compute_figures(plan, progress)
        num_kept = config.keep_checkpoints or 0
        finish(folder, best_step=progress.best_step, num_kept=num_kept, figures=figures)
    return FinetuneResult(folder=folder.model, **figures)


def build_learner(
    config: OfflineConfig,
    algorithm: AlgorithmSection,
    model: PreTrainedModel,
    num_total_steps: int,
    *,
    reference_model: PreTrainedModel | None = None,
) -> Trainer:
    """The trainer of reinforcement learning, with the loss of given tokens."""
    return Trainer(
        model,
        config.trainer,
        algorithm,
        max_model_len=config.model.max_model_len,
        num_total_steps=num_total_steps,
        reference_model=reference_model,
        dropout_seed=config.seed,
    )


def train(
    config: OfflineConfig,
    plan: FinetunePlan,
    model: PreTrainedModel,
    learner: Trainer,
    folder: FinetuneFolder,
    monitor: Monitor,
) -> Progress:
    """All steps from the last commit or the start; the last step is always committed."""
    progress = restore(folder, model, learner)
    if plan.num_dropped_rows:
        monitor.show_line(f"{plan.num_dropped_rows} rows are longer than model.max_model_len and were left out")
    batches, epochs = plan.batches, plan.progress
    for step in range(progress.step + 1, len(batches) + 1):
        started = time.perf_counter()
        metrics = learner.step(batches[step - 1])
        metrics["perf/train_s"] = time.perf_counter() - started
        metrics["perf/trained_tokens_per_s"] = metrics["train/num_trained_tokens"] / metrics["perf/train_s"]
        metrics["train/epoch"] = epochs[step - 1]
        monitor.log(step, "train", metrics)
        progress.step = step
        progress.losses.append(metrics["train/loss"])
        is_last = step == len(batches)
        is_best = evaluate(config, plan, learner, progress, monitor, is_last=is_last)
        if is_last or is_best or step % config.save_interval_steps == 0:
            commit(config, plan, model, learner, folder, progress)
    return progress


def evaluate(
    config: OfflineConfig,
    plan: FinetunePlan,
    learner: Trainer,
    progress: Progress,
    monitor: Monitor,
    *,
    is_last: bool,
) -> bool:
    """Measure the evaluation loss if it is due; return whether these weights are the best so far."""
    if not plan.eval_samples:
        progress.best_step = progress.step
        return False
    interval = config.evaluation_interval_steps
    if not (is_last or (interval > 0 and progress.step % interval == 0)):
        return False
    started = time.perf_counter()
    loss = learner.compute_loss(plan.eval_samples)
    if not math.isfinite(loss):
        raise TrainingError(f"the evaluation loss is {loss:g}: lower trainer.learning_rate, or try model.dtype=float32")
    is_best = progress.best_loss is None or loss < progress.best_loss
    if is_best:
        progress.best_step, progress.best_loss = progress.step, loss
    monitor.log(progress.step, "eval", {"eval/loss": loss, "perf/evaluation_s": time.perf_counter() - started})
    return is_best


def restore(folder: FinetuneFolder, model: PreTrainedModel, learner: Trainer) -> Progress:
    """Bring everything back to the last commit."""
    if folder.checkpoint is None:
        return Progress()
    state = load_checkpoint(folder.checkpoint, model)
    learner.load_state_dict(state.trainer_state)
    return Progress(**state.run_state)


def commit(
    config: OfflineConfig,
    plan: FinetunePlan,
    model: PreTrainedModel,
    learner: Trainer,
    folder: FinetuneFolder,
    progress: Progress,
) -> None:
    """Write the step's checkpoint; from here on the run never goes back behind it."""
    save_checkpoint(
        folder.paths.checkpoint(progress.step),
        model,
        plan.tokenizer,
        trainer_state=learner.state_dict(),
        run_state=asdict(progress),
    )
    best_step = progress.best_step if plan.eval_samples else None
    remove_checkpoints(folder.paths.root, num_kept=config.keep_checkpoints or 1, best_step=best_step)


def compute_figures(plan: FinetunePlan, progress: Progress) -> dict[str, Any]:
    """The result without its place."""
    last_losses = progress.losses[-plan.num_last_epoch_steps :]
    return {
        "num_steps": progress.step,
        "loss": sum(last_losses) / len(last_losses),
        "eval_loss": progress.best_loss,
        "best_step": progress.best_step,
        "num_rows": count_rows(plan.samples),
        "num_eval_rows": count_rows(plan.eval_samples),
        "num_dropped_rows": plan.num_dropped_rows,
        "num_trained_tokens": sum(sum(sample.is_sampled) for sample in plan.samples),
    }
