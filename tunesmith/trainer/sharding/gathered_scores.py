"""Per-token scores of an update, gathered over ranks.

Advantages, weights and masks may depend on all tokens of an update: their number, the mean of all advantages, a
quantile of all entropies. Every rank therefore gathers the scores of all tokens, computes with the same functions on
the same numbers, and keeps its own tokens' results. A trajectory is trained on one rank; tokens are ordered by
trajectory, as on a single rank, so random draws and sums are the same.

Axes: E trained tokens of the update over all ranks, Q trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from tunesmith.algorithms.scores import BatchScores
from tunesmith.cluster.ranks import Ranks

OPTIONAL_SCORES = ("logprobs_E", "entropies_E", "reference_logprobs_E", "teacher_logprobs_E", "values_E")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredScores:
    """Scores of all tokens of an update."""

    scores: BatchScores
    columns: Mapping[str, np.ndarray]
    """Further arrays [E] by name."""
    own_E: np.ndarray | slice
    """This rank's tokens, in their order."""


def gather_scores(
    ranks: Ranks, scores: BatchScores, trajectory_E: np.ndarray, columns: Mapping[str, np.ndarray]
) -> GatheredScores:
    """Gather the scores and further columns of this rank's tokens, which are ordered by trajectory, from all ranks.

    Which optional scores and columns are given must be the same on all ranks.
    """
    if ranks.is_alone:
        return GatheredScores(scores=scores, columns=columns, own_E=slice(None))
    given = {name: getattr(scores, name) for name in OPTIONAL_SCORES if getattr(scores, name) is not None}
    sent = {
        "trajectory": trajectory_E.astype(np.float64),
        "group": scores.group_Q[scores.sequence_E].astype(np.float64),
        "is_expert": scores.is_expert_Q[scores.sequence_E].astype(np.float64),
        "old_logprobs_E": scores.old_logprobs_E,
        "advantages_E": scores.advantages_E,
    } | given
    names = [*sent, *(f"column {name}" for name in columns)]
    parts = ranks.all_gather_columns(np.stack([*sent.values(), *columns.values()]).astype(np.float64))
    whole_FE = np.concatenate(parts, axis=1)
    rank_E = np.repeat(np.arange(ranks.world_size), [part.shape[1] for part in parts])
    order_E = np.argsort(whole_FE[0], kind="stable")
    gathered = dict(zip(names, whole_FE[:, order_E], strict=True))
    is_start_E = np.diff(gathered["trajectory"], prepend=-1) != 0
    return GatheredScores(
        scores=replace(
            scores,
            old_logprobs_E=gathered["old_logprobs_E"],
            advantages_E=gathered["advantages_E"],
            sequence_E=np.cumsum(is_start_E) - 1,
            group_Q=gathered["group"][is_start_E].astype(np.int64),
            is_expert_Q=gathered["is_expert"][is_start_E] > 0,
            **{name: gathered[name] for name in given},
        ),
        columns={name: gathered[f"column {name}"] for name in columns},
        own_E=np.flatnonzero(rank_E[order_E] == ranks.rank),
    )
