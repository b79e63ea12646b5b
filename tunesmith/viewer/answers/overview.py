"""The runs: their state, their metrics and their failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tunesmith.runs.record import RunState
from tunesmith.viewer.reading.rollout_index import NO_FAILURE
from tunesmith.viewer.reading.run import Run

MAX_POINTS = 1000
REWARD = "rollout/reward_mean"


def describe_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """State, steps and metrics of every run, and all names of metrics."""
    described = [describe_run(number, run) for number, run in enumerate(runs)]
    names = sorted({name for run in runs for name in run.metrics.names})
    return {"runs": described, "metrics": names}


def describe_run(number: int, run: Run) -> dict[str, Any]:
    run.metrics.refresh()
    steps, evaluations, config = run.rollouts.list_steps(), run.list_evaluated_steps(), run.settings
    algorithm = config.get("algorithm") if isinstance(config.get("algorithm"), dict) else {}
    model = config.get("model") if isinstance(config.get("model"), dict) else {}
    assert isinstance(algorithm, dict) and isinstance(model, dict)
    reward = run.metrics.get(REWARD)
    return {
        "id": number,
        "name": run.name,
        "path": str(run.root),
        "state": describe_state(run),
        "error": run.error,
        "stop_reason": run.stop_reason,
        "last_step": run.num_steps,
        "total_steps": run.total_steps,
        "algorithm": algorithm.get("algorithm_type") or config.get("algorithm_type"),
        "model": model.get("path"),
        "reward": [] if reward is None else reward.finite.last(1).values.tolist(),
        "steps": compress_steps(steps),
        "evaluations": evaluations,
        "has_selection": run.has_selection,
        "version": describe_version(run),
    }


def describe_state(run: Run) -> str:
    """The state of a run; a comparison of models has none."""
    return "comparison" if run.kind == "eval" else run.state


def compress_steps(steps: Sequence[int]) -> list[list[int]]:
    """Steps as ranges `[first, last]`."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ranges


def get_metric(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """The series of one metric in every run that has it."""
    series = []
    for number, run in enumerate(runs):
        if (found := run.metrics.get(name)) is not None:
            thinned = found.thin(MAX_POINTS)
            series.append({"run": number, "steps": thinned.steps.tolist(), "values": thinned.values.tolist()})
    return {"name": name, "series": series}


def get_versions(runs: Sequence[Run]) -> dict[str, Any]:
    """What changes when a run is written: for following it at little cost."""
    for run in runs:
        run.metrics.refresh()
    states = [run.state for run in runs]
    versions = [f"{state}.{describe_version(run)}" for run, state in zip(runs, states, strict=True)]
    return {"versions": versions, "is_running": RunState.RUNNING in states}


def describe_version(run: Run) -> str:
    steps, evaluations = run.rollouts.list_steps(), run.list_evaluated_steps()
    return f"{run.metrics.size}.{len(steps)}.{steps[-1] if steps else 0}.{len(evaluations)}"


MAX_CAUSES = 200
FAILURE = ["failure_message", "failure_line", "failure_traceback", "task_id"]


def list_failures(run: Run) -> dict[str, Any]:
    """Causes, most frequent first: counts, steps, and the newest failure in full."""
    run.index.extend()
    counts: dict[int, int] = {}
    newest: dict[int, Any] = {}
    first_steps: dict[int, int] = {}
    per_step: dict[int, dict[int, int]] = {}
    for rows in run.index.iter_rows():
        failed = rows[rows["failure"] != NO_FAILURE]
        for code in np.unique(failed["failure"]):
            members = failed[failed["failure"] == code]
            counts[int(code)] = counts.get(int(code), 0) + len(members)
            newest.setdefault(int(code), members[-1])
            first_steps[int(code)] = int(members["step"][0])
            steps, numbers = np.unique(members["step"], return_counts=True)
            per_step.setdefault(int(code), {}).update(zip(steps.tolist(), numbers.tolist(), strict=True))
    ordered = sorted(counts, key=lambda code: -counts[code])
    causes = []
    for code in ordered[:MAX_CAUSES]:
        cause, row = run.index.causes[code], newest[code]
        stored = next(run.rollouts.iter_rows(int(row["step"]), FAILURE, first=int(row["position"]), num_rows=1))
        causes.append(
            {
                "where": cause.where,
                "error": cause.error,
                "line": cause.line,
                "count": counts[code],
                "steps": sorted(per_step[code].items()),
                "first_step": first_steps[code],
                "example": {"step": int(row["step"]), "group": int(row["group"]), "run": int(row["run"])},
                "message": stored["failure_message"],
                "traceback": stored["failure_traceback"],
                "task_id": stored["task_id"],
            }
        )
    return {
        "num_rollouts": run.index.num_rows,
        "num_failures": sum(counts.values()),
        "num_causes": len(ordered),
        "causes": causes,
    }
