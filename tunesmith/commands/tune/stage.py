"""`tunesmith tune` as a stage of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.commands.stage import ChooseModel, StageResult, check_run, describe_device
from tunesmith.commands.tune.tune import run_tuning
from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.monitor.trackers import check_trackers
from tunesmith.runs.load_function import load_functions
from tunesmith.runs.record import RunRecord


def check_stage(config: RunConfig) -> None:
    check_run(config, models=[config.model.path])
    check_trackers(config.monitor.trackers)


def run_stage(config: RunConfig, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Train in the folder `out_dir`, or resume there."""
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
