"""`TokenInputs` of an update from one list per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tunesmith.algorithms.scores import TokenInputs

Rows = Sequence[Sequence[float]]


def build_scores(
    advantages: Rows,
    *,
    old: Rows | None = None,
    groups: Sequence[int] | None = None,
    experts: Sequence[bool] | None = None,
    step: int = 0,
    **scored: Rows,
) -> TokenInputs:
    """One row per sequence; old logprobs, which are the sampler's, default to 0, and each sequence is its own group."""
    lengths = [len(row) for row in advantages]
    columns = {
        "old_logprobs_E": flatten(old if old is not None else [[0.0] * length for length in lengths]),
        "advantages_E": flatten(advantages),
        "sequence_E": np.repeat(np.arange(len(lengths)), lengths),
        "group_E": np.repeat(np.asarray(range(len(lengths)) if groups is None else groups, dtype=np.int64), lengths),
        **{f"{name}_E": flatten(rows) for name, rows in scored.items()},
    }
    if experts is not None:
        columns["is_expert_E"] = np.repeat(np.asarray(experts, dtype=bool), lengths)
    own = {f"{name}_logprobs_E": columns["old_logprobs_E"] for name in ("sampler", "proximal")}
    return TokenInputs(**(own | columns), step=step)


def flatten(rows: Rows) -> np.ndarray:
    return np.asarray([value for row in rows for value in row], dtype=np.float64)
