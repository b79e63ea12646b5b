"""Runs one stage of each kind and collects the figures that the report shows for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from tunesmith.commands.eval.compare import run_eval
from tunesmith.commands.eval.comparison import ModelResult
from tunesmith.commands.eval.comparison_table import format_comparison, format_table
from tunesmith.commands.eval.radar import build_radar
from tunesmith.commands.eval.suites import apply_suite
from tunesmith.commands.export.run import run_export
from tunesmith.commands.pass_rate import measure_pass_rates
from tunesmith.commands.prepare.run import run_prepare
from tunesmith.commands.sft.preference import run_preference
from tunesmith.commands.sft.train import OfflineResult, run_sft
from tunesmith.commands.tune.tune import run_tuning
from tunesmith.config import (
    EvalConfig,
    ExportSection,
    FlywheelConfig,
    FunctionStage,
    OfflineConfig,
    ParetoSection,
    PassRateConfig,
    PreferenceConfig,
    PrepareSection,
    RftFilterSection,
    RunConfig,
    Section,
    SftConfig,
)
from tunesmith.errors import ConfigError
from tunesmith.et_agent.flywheel.run import run_flywheel
from tunesmith.et_agent.selection.diversity import format_diversity
from tunesmith.et_agent.selection.pareto import run_pareto
from tunesmith.et_agent.selection.rft import run_rft_filter
from tunesmith.model.load import resolve_device
from tunesmith.runs.load_function import load_function, load_functions
from tunesmith.runs.policy import BuildModel
from tunesmith.runs.record import RunRecord
from tunesmith.storage import load_json_lines, remove_tree, storage_errors

Kind = TypeVar("Kind", bound=Section)
TASKS_FILE = "tasks.jsonl"
TABLES = "tables"
"""Name of the figure that holds Markdown tables instead of a single value."""
RADAR = "radar"
"""Name of the figure that holds the measures of behavior of an evaluation, by task set, model and axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Result of a stage, in addition to its files."""

    model: Path | None = None
    tokens: int | None = None
    device: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Values in the report, by their label."""


ChooseModel = Callable[[RunConfig], BuildModel]
"""Returns the builder of the `model` that the workflows of a run receive."""


def run_stage(kind: str, settings: Section, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Run a stage with resolved references; an unfinished earlier attempt in `out_dir` is resumed."""
    if kind == "prepare":
        return run_prepare_stage(expect(settings, PrepareSection), out_dir)
    if kind == "sft":
        config = expect(settings, SftConfig)
        return describe_finetuning(config, run_sft(config, out_dir=out_dir))
    if kind == "prefer":
        preferences = expect(settings, PreferenceConfig)
        return describe_finetuning(preferences, run_preference(preferences, out_dir=out_dir))
    if kind == "rl":
        return run_rl_stage(expect(settings, RunConfig), out_dir, choose_model)
    if kind == "eval":
        return run_eval_stage(expect(settings, EvalConfig), out_dir, choose_model)
    if kind == "pass_rate":
        return run_pass_rate_stage(expect(settings, PassRateConfig), out_dir, choose_model)
    if kind == "pareto":
        return StageResult(figures=run_pareto(expect(settings, ParetoSection), out_dir=out_dir).figures)
    if kind == "rft_filter":
        return run_rft_stage(expect(settings, RftFilterSection), out_dir)
    if kind == "flywheel":
        return run_flywheel_stage(expect(settings, FlywheelConfig), out_dir, choose_model)
    if kind == "export":
        return run_export_stage(expect(settings, ExportSection), out_dir)
    return run_function_stage(expect(settings, FunctionStage), out_dir)


def expect(settings: Section, kind: type[Kind]) -> Kind:
    assert isinstance(settings, kind)
    return settings


def run_prepare_stage(settings: PrepareSection, out_dir: Path) -> StageResult:
    report = run_prepare(settings, out_dir=out_dir)
    dropped = {f"dropped: {reason}": count for reason, count in report.content["train"].get("dropped", {}).items()}
    return StageResult(figures={"training rows": report.num_train, "held-out rows": report.num_eval} | dropped)


def describe_finetuning(config: OfflineConfig, result: OfflineResult) -> StageResult:
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
        tokens=result.num_trained_tokens * config.num_epochs,
        device=describe_device(config.model.device, config.num_cpu_threads),
        figures={name: figure for name, figure in figures.items() if figure is not None},
    )


def run_rl_stage(config: RunConfig, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    location = {
        "checkpoint_root_dir": str(out_dir.parent.parent),
        "project": out_dir.parent.name,
        "name": out_dir.name,
        "continue_from_checkpoint": True,
    }
    config = config.model_copy(update=location)
    workflow, judge = load_functions(config)
    result = run_tuning(config, workflow=workflow, judge=judge, build_model=choose_model(config))
    if result.checkpoint is None:
        raise ConfigError(f"the run ended before its first step, so it has no model: {result.stop_reason}")
    return StageResult(
        model=result.checkpoint,
        device=describe_device(config.model.device, config.num_cpu_threads),
        **describe_training(RunRecord(result.folder)),
    )


def run_pass_rate_stage(config: PassRateConfig, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Measure the tasks into `tasks.jsonl`, unless an earlier attempt was killed after it was complete."""
    path = out_dir / TASKS_FILE
    if not path.exists():
        workflow, judge = load_functions(config)
        measure_pass_rates(
            config,
            workflow=workflow,
            judge=judge,
            build_model=choose_model(config),
            field=config.field,
            num_runs=config.num_runs,
            out=path,
            tool_keys=config.tool_keys,
            max_tasks=config.max_tasks,
        )
    rates = [row[config.field] for row in load_json_lines(path)]
    return StageResult(
        device=describe_device(config.model.device, config.num_cpu_threads),
        figures={
            "tasks with a scored rollout": len(rates),
            "mean pass rate": sum(rates) / len(rates) if rates else None,
            "tasks with a pass rate above 0 and below 1": sum(0 < rate < 1 for rate in rates),
        },
    )


def run_rft_stage(settings: RftFilterSection, out_dir: Path) -> StageResult:
    result = run_rft_filter(settings, out_dir=out_dir)
    dropped = {f"dropped: {reason}": count for reason, count in result.dropped.items() if count}
    table = format_table(["diversity", "before", "after"], format_diversity(result.before, result.after))
    return StageResult(figures={"kept trajectories": result.num_kept, **dropped, TABLES: table})


def run_flywheel_stage(config: FlywheelConfig, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    result = run_flywheel(config, out_dir=out_dir, build_model=choose_model(config.to_run_config()))
    figures: dict[str, Any] = {
        "questions": result.num_questions,
        "trajectories": result.num_trajectories,
        "right trajectories": result.num_correct,
        TABLES: tabulate(result.operators),
    }
    return StageResult(
        tokens=result.num_tokens,
        device=describe_device(config.model.device, config.num_cpu_threads),
        figures=figures,
    )


def tabulate(operators: Mapping[str, Mapping[str, int]]) -> str:
    """A table with a line for each operator."""
    columns = next(iter(operators.values()), {})
    return format_table(["operator", *columns], [[name, *map(str, row.values())] for name, row in operators.items()])


def describe_training(run: RunRecord) -> dict[str, Any]:
    """Sampled tokens and figures of all steps of a run."""

    def list_values(name: str) -> list[float]:
        series = run.metrics.get(name, "train")
        return [] if series is None else series.finite.values.tolist()

    rewards = list_values("rollout/reward_mean")
    figures: dict[str, Any] = {"steps": len(run.metrics.train_steps)}
    if rewards:
        tenth = max(1, len(rewards) // 10)
        figures["mean reward of the first tenth of the steps"] = sum(rewards[:tenth]) / tenth
        figures["mean reward of the last tenth of the steps"] = sum(rewards[-tenth:]) / tenth
    for name, key in (("seconds of rollouts", "perf/rollout_s"), ("seconds of training", "perf/train_s")):
        figures[name] = sum(list_values(key))
    figures["failed rollouts"] = int(sum(list_values("rollout/num_failed")))
    figures["largest mismatch of sampler and trainer (KL)"] = max([0.0, *list_values("mismatch/kl")])
    return {"tokens": int(sum(list_values("rollout/num_sampled_tokens"))), "figures": figures}


def run_eval_stage(config: EvalConfig, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    comparison = run_eval(config, out_dir=out_dir, build_model=choose_model(config.to_run_config()))
    figures: dict[str, Any] = {TABLES: format_comparison(comparison)}
    behavior = apply_suite(config.to_run_config(), config.suite).evaluation.behavior
    if behavior is not None:
        figures[RADAR] = build_radar(comparison, behavior, outcome_key=config.outcome_key)
    num_tokens = 0
    for name, set_comparison in comparison.items():
        for label, result in set_comparison.results.items():
            num_tokens += result.num_sampled_tokens
            figures[f"{label} on {name}"] = describe_result(result)
    return StageResult(
        tokens=num_tokens, device=describe_device(config.model.device, config.num_cpu_threads), figures=figures
    )


def describe_result(result: ModelResult) -> str:
    return f"{result.num_runs} runs, {result.num_sampled_tokens} tokens, {result.seconds:.1f} s"


def run_export_stage(settings: ExportSection, out_dir: Path) -> StageResult:
    report = run_export(settings, out_dir=out_dir)
    figures: dict[str, Any] = {"parameters": report.num_parameters}
    for path, checks in report.checks.items():
        figures |= {f"{path}: {name}": figure for name, figure in checks.items()}
    for written in (report.hf, report.adapter, *report.gguf.values()):
        if written is not None:
            figures[f"MB of {written.relative_to(report.folder)}"] = round(count_bytes(written) / 1e6, 1)
    return StageResult(model=report.hf, device="cpu", figures=figures)


def count_bytes(path: Path) -> int:
    """Size of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def run_function_stage(settings: FunctionStage, out_dir: Path) -> StageResult:
    """Call a user function with a new, empty folder; output of an earlier attempt is removed."""
    function = load_function(settings.function, knob="function")
    if out_dir.exists():
        remove_tree(out_dir)
    with storage_errors(out_dir, "write"):
        out_dir.mkdir(parents=True)
    figures = function(out_dir, **settings.args)
    if figures is not None and not isinstance(figures, Mapping):
        raise ConfigError(f"function={settings.function!r} must return a mapping or None, got {type(figures).__name__}")
    return StageResult(figures={str(name): figure for name, figure in (figures or {}).items()})


def describe_device(device: str, num_cpu_threads: int) -> str:
    """Name of the GPU, or the device type and its number of threads."""
    found = resolve_device(device)
    if found.type == "cuda":
        return torch.cuda.get_device_name(found)
    return f"{found.type}, {num_cpu_threads} {'thread' if num_cpu_threads == 1 else 'threads'}"
