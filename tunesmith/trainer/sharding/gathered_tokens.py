"""The tokens of an update over all ranks.

Advantages, weights and masks may depend on all tokens of an update: their number, the mean of all advantages, a
quantile of all entropies. Every rank therefore gathers the columns of all tokens, computes with the same functions on
the same numbers, and keeps its own tokens' results. A trajectory is trained on one rank; tokens are ordered by
trajectory, as on a single rank, so random draws and sums are the same.

Gathering takes the host of every rank time in proportion to the tokens of all ranks. Where the inputs of a token depend
on that token alone, but for the counts that the loss is divided by, only these counts are gathered (`measure_share`).

Axes: E trained tokens of the update.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.scores import TokenInputs
from tunesmith.cluster.ranks import Ranks
from tunesmith.trainer.metrics import TokenCounts


def gather_tokens(
    ranks: Ranks, tokens: TokenInputs, trajectory_E: np.ndarray
) -> tuple[TokenInputs, np.ndarray | slice]:
    """The tokens of all ranks, ordered by trajectory, and which of them are this rank's, in their order.

    This rank's tokens must be ordered by trajectory, and all ranks must have the same columns.
    """
    if ranks.is_alone:
        return tokens, slice(None)
    columns = tokens.list_columns()
    del columns["sequence_E"]  # numbered anew over all ranks
    parts = ranks.all_gather_columns(np.stack([trajectory_E, *columns.values()]).astype(np.float64))
    whole_FE = np.concatenate(parts, axis=1)
    order_E = np.argsort(whole_FE[0], kind="stable")
    rank_E = np.repeat(np.arange(ranks.world_size), [part.shape[1] for part in parts])
    gathered: dict[str, Any] = {
        name: values_E[order_E].astype(columns[name].dtype)
        for name, values_E in zip(columns, whole_FE[1:], strict=True)
    }
    sequence_E = np.cumsum(np.diff(whole_FE[0, order_E], prepend=-1) != 0) - 1
    return replace(tokens, sequence_E=sequence_E, **gathered), np.flatnonzero(rank_E[order_E] == ranks.rank)


def measure_share(ranks: Ranks, algorithm: Algorithm, tokens: TokenInputs) -> tuple[float, TokenCounts] | None:
    """What turns the inputs of a rank's own tokens into inputs of the whole update: a factor of their weights, and the
    counts of the update. None if the inputs depend on tokens of other ranks, or there are no others."""
    if ranks.is_alone or not algorithm.has_own_inputs:
        return None
    assert tokens.is_newest_E is not None
    has_experts = not tokens.find_sampled().all()
    own = (len(tokens.sequence_E), tokens.num_sequences, int(tokens.is_newest_E.sum()), has_experts)
    num_tokens, num_sequences, num_newest, num_with_experts = map(sum, zip(*ranks.all_gather_objects(own), strict=True))
    if num_with_experts:
        return None  # experts are weighted apart
    factor = 1.0
    if algorithm.aggregation == "token-mean":
        factor = own[0] / max(num_tokens, 1)
    elif algorithm.aggregation != "sum":
        factor = own[1] / max(num_sequences, 1)
    return factor, TokenCounts(num_sampled=num_tokens, num_newest=num_newest)
