"""The runs, their state and their metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.storage import load_json
from tunesmith.viewer.reading.run import Run

MAX_POINTS = 1000
REWARD = "rollout/reward_mean"


def describe_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """State, steps and metrics of every run, and all names of metrics."""
    described = [describe_run(number, run) for number, run in enumerate(runs)]
    names = sorted({name for run in runs for name in run.metrics.columns})
    return {"runs": described, "metrics": names}


def describe_run(number: int, run: Run) -> dict[str, Any]:
    run.metrics.refresh()
    steps, evaluations, config = run.files.list_steps(), run.list_evaluated_steps(), run.config
    algorithm = config.get("algorithm") if isinstance(config.get("algorithm"), dict) else {}
    model = config.get("model") if isinstance(config.get("model"), dict) else {}
    assert isinstance(algorithm, dict) and isinstance(model, dict)
    error = load_json(run.paths.error) if run.paths.error.is_file() else None
    reward = run.metrics.columns.get(REWARD)
    return {
        "id": number,
        "name": run.name,
        "path": str(run.root),
        "state": run.find_state(),
        "error": error,
        "stop_reason": load_json(run.paths.stopped).get("reason") if run.paths.stopped.is_file() else None,
        "last_step": run.metrics.last_step,
        "total_steps": config.get("total_steps"),
        "algorithm": algorithm.get("algorithm_type") or config.get("algorithm_type"),
        "model": model.get("path"),
        "reward": reward.thin(2)[1][-1:] if reward is not None else [],
        "steps": compress_steps(steps),
        "evaluations": evaluations,
        "has_selection": run.list_selected_steps(),
        "version": f"{run.metrics.size}.{len(steps)}.{steps[-1] if steps else 0}.{len(evaluations)}",
    }


def compress_steps(steps: Sequence[int]) -> list[list[int]]:
    """Steps as ranges `[first, last]`."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ranges


def get_metric(runs: Sequence[Run], name: str, *, max_points: int = MAX_POINTS) -> dict[str, Any]:
    """The series of one metric in every run that has it."""
    series = []
    for number, run in enumerate(runs):
        if (column := run.metrics.columns.get(name)) is not None:
            steps, values = column.thin(max_points)
            series.append({"run": number, "steps": steps, "values": values})
    return {"name": name, "series": series}


def get_versions(runs: Sequence[Run]) -> dict[str, Any]:
    """What changes when a run is written: for following it at little cost."""
    found = []
    for run in runs:
        run.metrics.refresh()
        steps = run.files.list_steps()
        state = run.find_state()
        found.append(
            f"{state}.{run.metrics.size}.{len(steps)}.{steps[-1] if steps else 0}.{len(run.list_evaluated_steps())}"
        )
    return {"versions": found, "is_running": any(version.startswith("running") for version in found)}
