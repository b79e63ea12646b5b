"""`tunesmith eval` as a stage of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.commands.eval.compare import find_model, run_eval
from tunesmith.commands.eval.comparison import ModelResult
from tunesmith.commands.eval.comparison_plot import check_plot
from tunesmith.commands.eval.comparison_table import format_comparison
from tunesmith.commands.eval.suites import apply_suite
from tunesmith.commands.stage import TABLES, ChooseModel, StageResult, check_run, describe_device
from tunesmith.config import EvalConfig


def check_stage(config: EvalConfig) -> None:
    run = apply_suite(config.to_run_config(), config.suite)
    check_run(run, models=[find_model(path) for path in config.models.values()])
    if config.has_plot:
        check_plot()


def run_stage(config: EvalConfig, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Compare the models; a killed evaluation resumes in `out_dir`."""
    comparison = run_eval(config, out_dir=out_dir, build_model=choose_model(config.to_run_config()))
    results = {
        f"{label} on {name}": result
        for name, set_comparison in comparison.items()
        for label, result in set_comparison.results.items()
    }
    figures: dict[str, Any] = {TABLES: format_comparison(comparison)}
    return StageResult(
        tokens=sum(result.num_sampled_tokens for result in results.values()),
        device=describe_device(config.model.device, config.num_cpu_threads),
        figures=figures | {name: describe_result(result) for name, result in results.items()},
        result=comparison,
    )


def describe_result(result: ModelResult) -> str:
    return f"{result.num_runs} runs, {result.num_sampled_tokens} tokens, {result.seconds:.1f} s"
