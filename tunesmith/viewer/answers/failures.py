"""Failures by cause, with the traceback of the newest one of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunesmith.viewer.reading.rollout_index import NO_FAILURE
from tunesmith.viewer.reading.run import Run

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
