"""The runs: their state, notes and metrics, what the doctor finds, and their failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.commands.doctor.diagnose import diagnose
from tunesmith.commands.doctor.record import CONFIGS
from tunesmith.monitor.metrics_file import Series
from tunesmith.runs.record import RunState
from tunesmith.storage import load_json, save_json
from tunesmith.viewer.reading.rollout_index import NO_FAILURE, ROW
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
    sections = (run.settings.get(name) for name in ("algorithm", "model"))
    algorithm, model = (section if isinstance(section, dict) else {} for section in sections)
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
        "algorithm": algorithm.get("algorithm_type") or run.settings.get("algorithm_type"),
        "model": model.get("path"),
        "reward": [] if reward is None else reward.finite.last(1).values.tolist(),
        "steps": compress_steps(run.rollouts.list_steps()),
        "has_selection": run.paths.selection(0).parent.is_dir(),
        "is_checked": run.kind in CONFIGS,
        **load_notes(run),
    }


def describe_state(run: Run) -> str:
    """The state of a run; a comparison of models has none, and a run that fails before its first step no folder."""
    return "removed" if not run.root.is_dir() else "comparison" if run.kind == "eval" else run.state


def load_notes(run: Run) -> dict[str, Any]:
    """What the user wrote about a run: `note` and `tags`."""
    path = run.paths.notes
    return {"note": "", "tags": []} | (load_json(path) if path.is_file() else {})


def save_notes(run: Run, given: Mapping[str, Any]) -> dict[str, Any]:
    """Save them; ValueError if they are not a text and a list of texts."""
    note, tags = given.get("note"), given.get("tags")
    if not isinstance(note, str) or not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError("notes must have `note`, a text, and `tags`, a list of texts")
    save_json(run.paths.notes, {"note": note, "tags": tags})
    return load_notes(run)


def describe_diagnosis(run: Run) -> dict[str, Any]:
    """What `tunesmith doctor` says about a run."""
    version = describe_version(run)
    if run.last_diagnosis is None or run.last_diagnosis[0] != version:
        run.last_diagnosis = (version, diagnose(run.root).to_json())
    return run.last_diagnosis[1]


def compress_steps(steps: Sequence[int]) -> list[list[int]]:
    """Steps as ranges `[first, last]`."""
    parts = np.split(np.array(steps, int), np.flatnonzero(np.diff(steps) != 1) + 1)
    return [[int(part[0]), int(part[-1])] for part in parts if len(part)]


def get_metric(runs: Sequence[Run], name: str) -> dict[str, Any]:
    series = []
    for number, run in enumerate(runs):
        if (found := run.metrics.get(name)) is not None:
            thinned = found.thin(MAX_POINTS)
            columns = {"steps": thinned.steps, "times": measure_times(run, thinned), "values": thinned.values}
            series.append({"run": number} | {key: column.tolist() for key, column in columns.items()})
    return {"name": name, "series": series}


def measure_times(run: Run, series: Series) -> NDArray[np.float64]:
    """Seconds that the run had worked when the steps of a series ended: in steps and evaluations, without pauses."""
    names = (("perf/step_s", "perf/train_s"), ("perf/evaluation_s",))
    found = [next(filter(None, map(run.metrics.get, each)), None) for each in names]
    parts = [each.finite for each in found if each is not None]
    steps = np.concatenate([np.zeros(1), *(part.steps for part in parts)])
    seconds = np.concatenate([np.zeros(1), *(part.values for part in parts)])
    order = np.argsort(steps, kind="stable")
    return np.cumsum(seconds[order]).round(2)[np.searchsorted(steps[order], series.steps, side="right") - 1]


def get_versions(runs: Sequence[Run]) -> dict[str, Any]:
    """What changes when a run is written: for following it at little cost."""
    for run in runs:
        run.metrics.refresh()
    versions = [describe_version(run) for run in runs]
    is_running = any(version.startswith(RunState.RUNNING) for version in versions)
    return {"versions": versions, "is_running": is_running}


def describe_version(run: Run) -> str:
    """The state, and when the files of the run were written."""
    paths = run.paths
    written = (paths.rollouts(0).parent, paths.evaluation(0).parent, paths.notes, paths.config)
    times = (path.stat().st_mtime_ns if path.exists() else 0 for path in written)
    return ".".join(map(str, (describe_state(run), run.metrics.size, *times)))


MAX_CAUSES, MAX_ERROR_CHARS = 200, 300
FAILURE = ["failure_message", "failure_line", "failure_traceback", "task_id"]


def list_failures(run: Run) -> dict[str, Any]:
    """Causes, most frequent first: counts, steps, and the newest failure in full."""
    run.index.extend()
    parts = [rows[rows["failure"] != NO_FAILURE] for rows in run.index.iter_rows()][::-1]
    failed = np.concatenate([np.empty(0, ROW), *parts])
    counts, known, causes = Counter(failed["failure"].tolist()), run.index.causes, []
    for code, count in counts.most_common(MAX_CAUSES):
        members = failed[failed["failure"] == code]
        cause, row = known[code], members[-1]
        steps, numbers = np.unique(members["step"], return_counts=True)
        ((_, stored),) = run.iter_stored(members[-1:], FAILURE)
        causes.append(
            {
                "where": cause.where,
                "error": cause.error[:MAX_ERROR_CHARS],
                "line": cause.line,
                "count": count,
                "steps": list(zip(steps.tolist(), numbers.tolist(), strict=True)),
                "example": {"step": int(row["step"]), "group": int(row["group"]), "run": int(row["run"])},
                "message": stored["failure_message"],
                "traceback": stored["failure_traceback"],
                "task_id": stored["task_id"],
            }
        )
    return {
        "num_rollouts": run.index.num_rows,
        "num_failures": len(failed),
        "num_causes": len(counts),
        "causes": causes,
    }
