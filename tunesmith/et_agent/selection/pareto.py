"""Group-wise Pareto sampling as a stage: rows with the numbers of their rollouts in, the selected rows out.

Questions without both a right and a wrong rollout are removed first. Then whole non-dominated fronts are kept while
they fit, and the front that does not fit is cut by crowding distance (ET-Agent, arXiv:2601.06860, section 3.3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.commands.stage import ChooseModel, StageResult, check_rows
from tunesmith.config import ParetoSection
from tunesmith.errors import DataError
from tunesmith.storage import save_json
from tunesmith.tasks.load import Row, check_finite, read_field, read_rows, write_rows
from tunesmith.tasks.pareto import CORRECT_AT, compute_spreads, find_mixed, read_rollouts, sort_by_front
from tunesmith.tasks.selector import Floats, Indices

ROWS_FILE, REPORT_FILE = "train.jsonl", "report.json"
RANK_KEY, DISTANCE_KEY = "pareto_front", "pareto_distance"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoSelection:
    """Questions selected by `select_pareto`; arrays are aligned with `indices`."""

    indices: Indices
    """Selected questions, best front first, within a front by descending crowding distance."""
    ranks: Indices
    """Front of each, from 0, among the questions with mixed outcomes of its stratum."""
    distances: Floats
    """Crowding distance of each within its front."""
    num_mixed: int
    """Questions with mixed outcomes, from which was selected."""


def check_stage(config: ParetoSection) -> None:
    check_rows(config.data)


def run_stage(config: ParetoSection, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Write the selected rows to `train.jsonl`, each with its front and crowding distance, null for the ends of a
    front. DataError if no question has mixed outcomes."""
    rows = read_rows(config.data)
    keys = {"correctness_key": config.correctness_key, "tool_calls_key": config.tool_calls_key}
    numbers = [read_rollouts(row, **keys, where=f"row {i} of {config.data!r}") for i, row in enumerate(rows)]
    correctness, calls = ([each[place] for each in numbers] for place in (0, 1))
    check_finite(rows, path=config.data)
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
    chosen = selection.indices.tolist()
    write_rows(out_dir / ROWS_FILE, (describe_row(rows[index], selection, at) for at, index in enumerate(chosen)))
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
    return StageResult(figures=figures)


def read_sources(rows: list[Row], key: str, *, path: str) -> list[str]:
    advice = ". Fix the data, or change stratify_by"
    return [str(read_field(row, key, where=f"row {i} of {path!r}", advice=advice)) for i, row in enumerate(rows)]


def describe_row(row: Row, selection: ParetoSelection, at: int) -> dict[str, Any]:
    distance = float(selection.distances[at])
    numbers = {RANK_KEY: int(selection.ranks[at]), DISTANCE_KEY: distance if math.isfinite(distance) else None}
    return {**row, **numbers}


def average_spread(values: list[list[float]], chosen: list[int]) -> float:
    return float(compute_spreads([values[index] for index in chosen]).mean())


def select_pareto(
    correctness: Sequence[Sequence[float]],
    tool_calls: Sequence[Sequence[float]],
    *,
    num_selected: int,
    seed: int,
    correct_at: float = CORRECT_AT,
    strata: Sequence[str] | None = None,
    shares: Mapping[str, float] | None = None,
) -> ParetoSelection:
    """Select at most `num_selected` questions with mixed outcomes, by fronts of their two spreads.

    `correctness` and `tool_calls` hold one number for each scored rollout of each question. With `strata`, the source
    of each question, fronts are found within each source; the sources share the selection in proportion to `shares`,
    by default to their questions with mixed outcomes. What a source cannot fill goes to the others.
    """
    mixed_M = np.flatnonzero(find_mixed(correctness, correct_at=correct_at))
    kept_calls = [tool_calls[index] for index in mixed_M.tolist()]
    kept_correctness = [correctness[index] for index in mixed_M.tolist()]
    points_M2 = np.stack([compute_spreads(kept_correctness), compute_spreads(kept_calls)], axis=1)
    names_M = np.asarray(["" if strata is None else strata[index] for index in mixed_M.tolist()], dtype=str)
    names, stratum_M, counts = np.unique(names_M, return_inverse=True, return_counts=True)
    quotas = divide_quota(num_selected, dict(zip(names.tolist(), counts.tolist(), strict=True)), shares=shares)
    nothing = np.empty(0, dtype=np.int64)
    picked = [(nothing, nothing, np.empty(0))]
    for stratum, quota in enumerate(quotas.values()):
        members = np.flatnonzero(stratum_M == stratum)
        rng = np.random.default_rng((seed, stratum))
        order, ranks, distances = sort_by_front(points_M2[members], rng=rng)
        picked.append((mixed_M[members[order[:quota]]], ranks[:quota], distances[:quota]))
    indices, ranks, distances = (np.concatenate(each) for each in zip(*picked, strict=True))
    order = np.lexsort((np.arange(len(indices)), -distances, ranks)) if strata is not None else np.arange(len(indices))
    return ParetoSelection(
        indices=indices[order],
        ranks=ranks[order],
        distances=distances[order],
        num_mixed=len(mixed_M),
    )


def divide_quota(total: int, counts: Mapping[str, int], *, shares: Mapping[str, float] | None) -> dict[str, int]:
    """How many questions to select from each source: at most its count, otherwise by largest remainder of the shares.

    Raises DataError for a share of an unknown source; a source without a share is not selected from.
    """
    unknown = [name for name in shares or {} if name not in counts]
    if unknown:
        raise DataError(
            f"shares names the source {unknown[0]!r}, but questions with mixed outcomes have only "
            f"{', '.join(map(repr, counts)) or 'none'}"
        )
    weights: dict[str, float] = {name: (counts if shares is None else shares).get(name, 0) for name in counts}
    quotas = dict.fromkeys(counts, 0)
    while True:
        open_weights = {name: weights[name] for name in counts if quotas[name] < counts[name] and weights[name] > 0}
        left = total - sum(quotas.values())
        if left <= 0 or not open_weights:
            return quotas
        whole = sum(open_weights.values())
        exact = {name: left * weight / whole for name, weight in open_weights.items()}
        given = {name: int(each) for name, each in exact.items()}
        by_remainder = sorted(exact, key=lambda name: (given[name] - exact[name], name))
        for name in by_remainder[: left - sum(given.values())]:
            given[name] += 1
        for name, each in given.items():
            quotas[name] = min(counts[name], quotas[name] + each)
