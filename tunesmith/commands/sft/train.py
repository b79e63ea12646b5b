"""Supervised fine-tuning and preference training, with the trainer of reinforcement learning.

Rows of messages become samples whose assistant tokens are trained; batches are filled up to a token limit. Settings,
rows and files are checked before weights are read. An interrupted run resumes from its last checkpoint. The result is
`model/`: the weights with the lowest evaluation loss, or the last ones if no rows are held out.

    config.yaml  sources.json               settings, and digests of the rows
    error.json                              the error that stopped the training; removed when it is resumed
    metrics.jsonl  monitor/                 metrics
    global_step_N/                          checkpoints; `keep_checkpoints` of them remain at the end
    model/                                  the result; its DONE.json is written last and holds the summary
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.commands.sft.conversations import PreferenceReader, add_probes
from tunesmith.commands.sft.plan import OfflinePlan, build_plan, count_rows, digest_sources
from tunesmith.commands.stage import ChooseModel, StageResult, check_models, describe_device, describe_run
from tunesmith.config import EarlyStoppingSection, OfflineConfig, PreferenceConfig, SftConfig
from tunesmith.engine.event_loop.signal_handlers import StopAfterStep, raise_signal
from tunesmith.errors import DataError, StorageError, TrainingError
from tunesmith.model.checkpoint import (
    estimate_checkpoint_bytes,
    load_checkpoint,
    remove_old_checkpoints,
    restore_weights,
    save_checkpoint,
    save_model_files,
)
from tunesmith.model.forward.logits import verify_model
from tunesmith.model.load import check_vocabulary, load_section_model
from tunesmith.model.torch_modes import set_num_threads
from tunesmith.monitor.metrics_file import load_metrics
from tunesmith.monitor.monitor import Monitor
from tunesmith.monitor.tracker import check_trackers
from tunesmith.runs.early_stopping import EarlyStopping
from tunesmith.runs.extra_models import check_reference, load_reference
from tunesmith.runs.memory import fit_offline
from tunesmith.runs.record import MODEL
from tunesmith.runs.result import TrainingResult
from tunesmith.runs.workspace import SPEED_KEYS, Workspace, recorded_error
from tunesmith.storage import (
    DONE,
    TEMPORARY,
    RunPaths,
    check_complete,
    check_free_space,
    find_checkpoints,
    load_json,
    new_folder,
    parse_checkpoint_step,
    remove_leftovers,
    remove_tree,
)
from tunesmith.trainer.trainer import Trainer
from tunesmith.types import Sample

MUTABLE_KEYS = ("save_interval_steps", "save_interval_s", "keep_checkpoints", "monitor", *SPEED_KEYS)
"""Keys that may change when training is resumed."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OfflineResult(TrainingResult):
    """Result of supervised fine-tuning or preference training."""

    folder: Path
    """Folder of the model or adapter; `model.path` accepts it."""
    num_steps: int
    loss: float
    """Mean of the algorithm's own loss over the last epoch's batches; with `sft` in nats per token."""
    eval_loss: float | None
    """Evaluation loss of the kept weights, in fine-tuning always nats per token; None if no rows are held out."""
    best_step: int
    """The step whose weights were kept."""
    num_rows: int
    """Rows trained on."""
    num_eval_rows: int
    num_dropped_rows: int
    """Rows dropped because they exceed the model's context."""
    num_trained_tokens: int
    """Trained tokens in one epoch."""
    stop_reason: str | None = None
    """Why the training ended before its last step; None if it did not."""
    total_trained_tokens: int | None = None
    """Trained tokens of all steps; None in folders of earlier versions."""

    @property
    def run_folder(self) -> Path:
        return self.folder.parent

    @property
    def model_path(self) -> str:
        return str(self.folder)

    @property
    def metrics(self) -> dict[str, float | None]:
        """Metrics of the last step."""
        return dict(self.history.rows.get(self.num_steps, {}))

    def list_facts(self) -> dict[str, str]:
        facts = {
            "folder": str(self.run_folder),
            "model": self.model_path,
            "steps": f"{self.num_steps} on {self.num_rows} rows",
            "loss": f"{self.loss:.4f} over the last epoch",
        }
        if self.num_dropped_rows:
            facts["dropped"] = f"{self.num_dropped_rows} rows longer than the context"
        if self.eval_loss is not None:
            facts["eval loss"] = f"{self.eval_loss:.4f} at step {self.best_step}, whose weights are kept"
        return facts


@dataclass(slots=True, kw_only=True)
class OfflineProgress:
    """Training progress; saved in checkpoints with the trainer's state."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    best_step: int | None = None
    best_loss: float | None = None
    stop_reason: str | None = None


def run_offline(config: SftConfig | PreferenceConfig, *, out_dir: Path) -> OfflineResult:
    """Train into `out_dir`, resuming an interrupted run with the same settings; raises if training fails."""
    root = Path(out_dir).expanduser().absolute()
    workspace = Workspace(root)
    summary = load_summary(workspace, config)
    if summary is not None:
        return OfflineResult(folder=root / MODEL, **summary)
    set_num_threads(config.num_cpu_threads)
    algorithm, resolved = config.algorithm, resolve_algorithm(config.algorithm)
    has_reference = "reference" in resolved.needs
    check_reference(resolved, config.model)
    plan = build_preference_plan(config) if isinstance(config, PreferenceConfig) else build_plan(config)
    with workspace:
        checkpoint = resume_training(workspace, config, plan.sources)
        with Monitor(
            root,
            config.monitor,
            total_steps=len(plan.batches),
            committed_step=None if checkpoint is None else parse_checkpoint_step(checkpoint),
            run_settings=config.model_dump(mode="json"),
        ) as monitor:
            model = load_section_model(config.model)
            check_vocabulary(model, plan.tokenizer)
            verify_model(model)  # as an engine does
            fitted = fit_offline(config, model, has_reference=has_reference)
            for line in describe_run(model, config.model, root, fitted):
                monitor.show_line(line)
            trainer = Trainer(
                model,
                fitted.trainer,
                algorithm,
                max_model_len=config.model.max_model_len,
                num_total_steps=len(plan.batches),
                reference_model=load_reference(config.model, policy=model) if has_reference else None,
                dropout_seed=config.seed,
            )
            progress = restore(checkpoint, model, trainer)
            training = OfflineTraining(
                config=config,
                plan=plan,
                model=model,
                trainer=trainer,
                progress=progress,
                paths=workspace.paths,
                monitor=monitor,
            )
            training.run()
            summary = summarize_training(plan, progress)
            training.finish(summary)
    return OfflineResult(folder=root / MODEL, **summary)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineTraining:
    """A training on given rows, between its checkpoints."""

    config: OfflineConfig
    plan: OfflinePlan
    model: PreTrainedModel
    trainer: Trainer
    progress: OfflineProgress
    paths: RunPaths
    monitor: Monitor

    def run(self) -> None:
        """Run all remaining steps. A signal ends the training after a step, which is saved."""
        self.remove_replaced()  # by a run that was killed before it did
        check_free_space(self.paths.root, estimate_checkpoint_bytes(self.model, self.trainer.state_dict()))
        with StopAfterStep() as stop:
            self.run_steps(stop)
        if stop.signal_number is not None:
            step, num_steps = self.progress.step, len(self.plan.batches)
            if not self.paths.checkpoint(step).exists():  # the signal came after the last step
                self.commit()
            self.monitor.show_line(f"interrupted; step {step} of {num_steps} is saved: repeat the command to resume")
            raise_signal(stop.signal_number)

    def run_steps(self, stop: StopAfterStep) -> None:
        plan, progress, monitor = self.plan, self.progress, self.monitor
        stopping = self.build_early_stopping()
        if plan.num_dropped_rows:
            monitor.show_line(f"{plan.num_dropped_rows} rows are longer than model.max_model_len and were dropped")
        batches, epochs = plan.batches, plan.progress
        has_ended = progress.step == len(batches) or progress.stop_reason is not None
        saved_at, max_age_s = time.monotonic(), self.config.save_interval_s or math.inf
        is_interrupted = stop.signal_number is not None
        while not has_ended and not is_interrupted:
            step = progress.step + 1
            with recorded_error(self.paths, step):
                started = time.perf_counter()
                metrics = self.trainer.step(batches[step - 1])
                metrics["perf/train_s"] = time.perf_counter() - started
                metrics["perf/trained_tokens_per_s"] = metrics["train/num_trained_tokens"] / metrics["perf/train_s"]
                metrics["train/epoch"] = epochs[step - 1]
                monitor.log(step, "train", metrics)
                progress.step = step
                progress.losses.append(metrics["train/loss"])
                is_last = step == len(batches)
                is_best = self.evaluate(stopping, is_last=is_last)
                if progress.stop_reason is not None:
                    monitor.show_line(f"ended early, after step {step} of {len(batches)}: {progress.stop_reason}")
                has_ended = is_last or progress.stop_reason is not None
                is_interrupted = stop.signal_number is not None
                is_old = time.monotonic() - saved_at >= max_age_s
                is_due = is_old or is_best or step % self.config.save_interval_steps == 0
                if is_interrupted or (self.config.keep_checkpoints is not None if has_ended else is_due):
                    self.commit()
                    saved_at = time.monotonic()

    def build_early_stopping(self) -> EarlyStopping | None:
        """The rule of `early_stopping` with the evaluations up to the checkpoint; None without the knob."""
        if self.config.early_stopping is None:
            return None
        rule = EarlyStoppingSection(metric="eval/loss", mode="min", **self.config.early_stopping.model_dump())
        stopping = EarlyStopping(rule)
        for record in load_metrics(self.paths.metrics):
            stopping.add(record["step"], record["kind"], {"eval/loss": record.get("eval/loss")})
        return stopping

    def evaluate(self, stopping: EarlyStopping | None, *, is_last: bool) -> bool:
        """Compute the evaluation loss if it is due; return whether these weights are the best so far. Sets
        `progress.stop_reason` if the training ends here although it is not the last step."""
        progress, interval = self.progress, self.config.evaluation_interval_steps
        if not self.plan.eval_samples:
            progress.best_step = progress.step
            return False
        if not (is_last or (interval > 0 and progress.step % interval == 0)):
            return False
        started = time.perf_counter()
        loss = self.trainer.compute_loss(self.plan.eval_samples)
        if not math.isfinite(loss):
            advice = "lower trainer.learning_rate, or try model.dtype=float32"
            raise TrainingError(f"the evaluation loss is {loss:g}: {advice}")
        is_best = progress.best_loss is None or loss < progress.best_loss
        if is_best:
            progress.best_step, progress.best_loss = progress.step, loss
        metrics = {"eval/loss": loss, "perf/evaluation_s": time.perf_counter() - started}
        self.monitor.log(progress.step, "eval", metrics)
        if stopping is not None and not is_last:
            stopping.add(progress.step, "eval", metrics)
            progress.stop_reason = stopping.reason
        return is_best

    def commit(self) -> None:
        """Save the step's checkpoint and remove old ones."""
        save_checkpoint(
            self.paths.checkpoint(self.progress.step),
            self.model,
            self.plan.tokenizer,
            trainer_state=self.trainer.state_dict(),
            run_state=asdict(self.progress),
        )
        self.remove_replaced()

    def remove_replaced(self) -> None:
        best_step = self.progress.best_step if self.plan.eval_samples else None
        remove_old_checkpoints(self.paths.root, num_kept=self.config.keep_checkpoints or 1, best_step=best_step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the best weights to `model/`, which are those of the model or of a checkpoint, then remove checkpoints
        beyond `keep_checkpoints`."""
        step, best_step = self.progress.step, self.progress.best_step
        assert best_step is not None
        record = {"step": best_step, "figures": dict(summary)}
        with recorded_error(self.paths, step), new_folder(self.paths.root / MODEL, record) as temporary:
            if best_step != step:
                check_complete(self.paths.checkpoint(best_step))
                restore_weights(self.paths.checkpoint(best_step), self.model)
            check_free_space(temporary, estimate_checkpoint_bytes(self.model, {}))
            save_model_files(temporary, self.model, self.plan.tokenizer)
        remove_old_checkpoints(self.paths.root, num_kept=self.config.keep_checkpoints or 0)


def restore(checkpoint: Path | None, model: PreTrainedModel, trainer: Trainer) -> OfflineProgress:
    if checkpoint is None:
        return OfflineProgress()
    state = load_checkpoint(checkpoint, model)
    trainer.load_state_dict(state.trainer_state)
    return OfflineProgress(**state.run_state)


def summarize_training(plan: OfflinePlan, progress: OfflineProgress) -> dict[str, Any]:
    """The fields of the result except its folder."""
    epochs = [math.ceil(each) for each in plan.progress[: progress.step]]
    last_losses = [loss for loss, epoch in zip(progress.losses, epochs, strict=True) if epoch == epochs[-1]]
    return {
        "num_steps": progress.step,
        "loss": sum(last_losses) / len(last_losses),
        "eval_loss": progress.best_loss,
        "best_step": progress.best_step,
        "num_rows": count_rows(plan.samples),
        "num_eval_rows": count_rows(plan.eval_samples),
        "num_dropped_rows": plan.num_dropped_rows,
        "num_trained_tokens": count_trained_tokens(plan.samples),
        "stop_reason": progress.stop_reason,
        "total_trained_tokens": sum(map(count_trained_tokens, plan.batches[: progress.step])),
    }


def count_trained_tokens(samples: Sequence[Sample]) -> int:
    """Tokens with a gradient; probes have none."""
    return sum(sum(sample.is_sampled) for sample in samples if any(sample.advantages))


def check_stage(config: OfflineConfig) -> None:
    check_models(config.model, [config.model.path])
    check_trackers(config.monitor.trackers)


def run_stage(config: SftConfig | PreferenceConfig, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Fine-tuning or preference training as a stage."""
    result = run_offline(config, out_dir=out_dir)
    figures = {
        "rows": result.num_rows,
        "steps": result.num_steps,
        "loss": result.loss,
        "evaluation loss": result.eval_loss,
        "kept the weights of step": result.best_step,
        "rows left out as too long": result.num_dropped_rows,
    }
    return StageResult(
        model=result.folder,
        tokens=result.total_trained_tokens,
        device=describe_device(config.model.device, config.num_cpu_threads),
        figures={name: figure for name, figure in figures.items() if figure is not None},
    )


def load_summary(workspace: Workspace, config: OfflineConfig) -> dict[str, Any] | None:
    """The summary of a finished training, None if it has not finished; raises if settings or rows differ."""
    root = workspace.root
    if not (root / MODEL / DONE).is_file():
        return None
    workspace.check_config(config, mutable_keys=MUTABLE_KEYS, sources=digest_sources(config))
    check_complete(root / MODEL)
    num_kept = config.keep_checkpoints or 0
    if len(find_checkpoints(root)) > num_kept or any(TEMPORARY.search(path.name) for path in root.iterdir()):
        with workspace:  # interrupted after the model was written
            remove_leftovers(root)
            remove_old_checkpoints(root, num_kept=num_kept)
    summary: dict[str, Any] = load_json(root / MODEL / DONE)["figures"]
    return summary


def resume_training(workspace: Workspace, config: OfflineConfig, sources: Mapping[str, str | None]) -> Path | None:
    """Prepare the locked folder for the remaining steps; returns the last checkpoint, None if there is none."""
    checkpoint = find_whole_checkpoint(workspace.root)
    # a run that failed before its first checkpoint starts again, with any settings and rows
    mutable_keys = MUTABLE_KEYS if checkpoint is not None else (*type(config).model_fields, "sources")
    workspace.check_config(config, mutable_keys=mutable_keys, sources=sources)
    workspace.begin(config, sources)
    if (model := workspace.root / MODEL).is_dir():
        remove_tree(model)
    return checkpoint


def find_whole_checkpoint(root: Path) -> Path | None:
    """The last checkpoint, None if there is none; if it is damaged, the error states how to resume from the one
    before."""
    checkpoints = find_checkpoints(root)
    if not checkpoints:
        return None
    *older, last = checkpoints
    try:
        check_complete(last)
    except StorageError as error:
        way = f"to resume from {older[-1].name}" if older else "to restart"
        raise StorageError(f"{error}; restore it, or move {last.name} out of {root} {way}") from error
    return last


def build_preference_plan(config: PreferenceConfig) -> OfflinePlan:
    """Run every check that needs no weights, and read the rows; KTO batches get their mismatched pairs (probes)."""
    is_kto = config.algorithm_type == "kto"
    plan = build_plan(config, partial(PreferenceReader, kind="labels" if is_kto else "pairs"))
    if not is_kto:
        return plan
    if count_rows(plan.samples) < 2:
        raise DataError("kto pairs prompts with completions of other rows and needs at least 2 rows, got 1")
    add = partial(add_probes, max_model_len=config.model.max_model_len)
    epochs = [[add(batch) for batch in epoch] for epoch in plan.epochs]
    return replace(plan, epochs=epochs, eval_samples=add(plan.eval_samples))
