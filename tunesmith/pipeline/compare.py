"""Several models on the same held-out tasks, side by side, with the same draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunesmith.config import RunConfig
from tunesmith.engine.clock import run_lockstep
from tunesmith.errors import ConfigError
from tunesmith.pipeline.evaluate import EvaluationResult
from tunesmith.pipeline.policy import BuildModel, check_policy
from tunesmith.pipeline.stage import evaluate_all, load_stage
from tunesmith.rollout.groups import check_failures
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.tasks.load import load_tasks
from tunesmith.types import JudgeType, WorkflowType

Comparison = Mapping[str, Mapping[str, EvaluationResult]]
"""Model path -> name of the task set -> result."""


def run_comparison(
    config: RunConfig,
    *,
    workflow: WorkflowType,
    judge: JudgeType | None,
    build_model: BuildModel,
    model_paths: Sequence[str],
) -> Comparison:
    """Evaluate each model on each of the config's held-out sets; raises when too many runs of a set fail."""
    check_workflow_function(workflow)
    if judge is not None:
        check_judge_function(judge)
    if not config.eval_datasets:
        raise ConfigError("eval_datasets is empty: name at least one held-out set, as eval_datasets.test.path=...")
    eval_tasks = {
        name: load_tasks(dataset, name=name)[: config.evaluation.max_tasks]
        for name, dataset in config.eval_datasets.items()
    }
    configs = {path: with_model_path(config, path) for path in model_paths}
    for each in configs.values():
        check_policy(each.model)
    results: dict[str, dict[str, EvaluationResult]] = {}
    for path, each in configs.items():
        stage = load_stage(each, workflow=workflow, judge=judge, build_model=build_model)
        results[path] = run_lockstep(evaluate_all(each, stage, eval_tasks, policy_version=0))
        for result in results[path].values():
            check_failures(result.groups, max_failure_rate=config.rollout.max_failure_rate)
    return results


def with_model_path(config: RunConfig, path: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def format_comparison(results: Comparison) -> str:
    """A table: one line a model and task set."""
    width = max(len(path) for path in results)
    lines = [f"{'model':<{width}}  {'tasks':<16} {'reward':>8} {'95 % interval':>18} {'n':>6} {'failed':>6}"]
    for path, sets in results.items():
        for name, result in sets.items():
            reward = "-" if result.mean is None else f"{result.mean:.4f}"
            interval = "-" if result.interval is None else f"{result.interval[0]:.4f} - {result.interval[1]:.4f}"
            counts = f"{len(result.groups):>6} {result.num_failures:>6}"
            lines.append(f"{path:<{width}}  {name:<16} {reward:>8} {interval:>18} {counts}")
    return "\n".join(lines)
