"""Group-wise Pareto sampling as a stage: rows with the numbers of their rollouts in, the selected rows out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.commands.sft.conversation_rows import Row
from tunesmith.config.stages.pareto import ParetoSection
from tunesmith.errors import DataError
from tunesmith.et_agent.selection.rows import read_rows, write_rows
from tunesmith.storage import save_json
from tunesmith.tasks.pareto import ParetoSelection, compute_spreads, read_rollouts, select_pareto

ROWS_FILE, REPORT_FILE = "train.jsonl", "report.json"
RANK_KEY, DISTANCE_KEY = "pareto_front", "pareto_distance"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoResult:
    """Result of the selection."""

    path: Path
    """The selected rows, best front first."""
    figures: dict[str, Any]
    """Counts and mean spreads, by their label in the report."""


def run_pareto(config: ParetoSection, *, out_dir: Path) -> ParetoResult:
    """Write the selected rows to `train.jsonl`, each with its front and crowding distance, null for the ends of a
    front; raises DataError if no question has mixed outcomes."""
    rows = read_rows(config.data)
    correctness, calls = (
        [read_rollouts(row, key=key, where=f"row {index} of {config.data!r}") for index, row in enumerate(rows)]
        for key in (config.correctness_key, config.tool_calls_key)
    )
    selection = select_pareto(
        correctness,
        calls,
        num_selected=config.num_selected,
        seed=config.seed,
        correct_at=config.correct_at,
        strata=None if config.stratify_by is None else read_sources(rows, config.stratify_by, path=config.data),
        shares=config.shares,
    )
    if not len(selection.indices):
        raise DataError(
            f"no question of {config.data!r} has a right and a wrong rollout (correctness of at least "
            f"{config.correct_at:g} and below it): measure more rollouts, other questions, or change correct_at"
        )
    path = out_dir / ROWS_FILE
    write_rows(path, (describe_row(rows[index], selection, at) for at, index in enumerate(selection.indices.tolist())))
    chosen = selection.indices.tolist()
    figures: dict[str, Any] = {
        "questions": len(rows),
        "questions with mixed outcomes": selection.num_mixed,
        "selected questions": len(chosen),
        "fronts used": int(selection.ranks.max()) + 1,
        "mean std of correctness": average_spread(correctness, chosen),
        "mean std of tool calls": average_spread(calls, chosen),
    }
    if config.stratify_by is not None:
        counts = Counter(str(rows[index][config.stratify_by]) for index in chosen)
        figures |= {f"selected of {name}": count for name, count in sorted(counts.items())}
    save_json(out_dir / REPORT_FILE, figures)
    return ParetoResult(path=path, figures=figures)


def read_sources(rows: list[Row], key: str, *, path: str) -> list[str]:
    for index, row in enumerate(rows):
        if row.get(key) is None:
            raise DataError(
                f"row {index} of {path!r} has no {key!r}, the field of stratify_by: fix the data or the knob"
            )
    return [str(row[key]) for row in rows]


def describe_row(row: Row, selection: ParetoSelection, at: int) -> dict[str, Any]:
    distance = float(selection.distances[at])
    numbers = {RANK_KEY: int(selection.ranks[at]), DISTANCE_KEY: distance if math.isfinite(distance) else None}
    return {**row, **numbers}


def average_spread(values: list[list[float]], chosen: list[int]) -> float:
    return float(compute_spreads([values[index] for index in chosen]).mean())
