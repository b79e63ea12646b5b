"""A rank's share of an update whose inputs are those of each token: only counts go between ranks.

Gathering the scores of all tokens (`gathered_scores`) takes the host of every rank time in proportion to the tokens of
all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tunesmith.algorithms.algorithm import Algorithm
from tunesmith.algorithms.scores import BatchScores, TokenInputs
from tunesmith.cluster.ranks import Ranks
from tunesmith.trainer.metrics import TokenCounts
from tunesmith.trainer.token_terms import has_own_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShare:
    """What turns the inputs of a rank's own tokens into inputs of the whole update."""

    weight_factor: float
    """A weight over this rank's tokens times this is the weight over all ranks' tokens."""
    counts: TokenCounts
    """Of the whole update."""

    def apply(self, inputs: TokenInputs[np.ndarray]) -> TokenInputs[np.ndarray]:
        """The inputs [E] of this rank's tokens as parts of the whole update."""
        return replace(inputs, weights_E=inputs.weights_E * self.weight_factor)


def measure_share(
    ranks: Ranks, algorithm: Algorithm, scores: BatchScores, is_newest_E: np.ndarray
) -> UpdateShare | None:
    """The share of this rank's tokens; None if their inputs depend on tokens of other ranks, or there are no others."""
    if ranks.is_alone or not has_own_inputs(algorithm):
        return None
    own = (len(scores.sequence_E), scores.num_sequences, int(is_newest_E.sum()), bool(scores.is_expert_Q.any()))
    num_tokens, num_sequences, num_newest, num_with_experts = map(sum, zip(*ranks.all_gather_objects(own), strict=True))
    if num_with_experts:
        return None  # experts are weighted apart
    factor = 1.0
    if algorithm.aggregation == "token-mean":
        factor = own[0] / max(num_tokens, 1)
    elif algorithm.aggregation != "sum":
        factor = own[1] / max(num_sequences, 1)
    return UpdateShare(weight_factor=factor, counts=TokenCounts(num_sampled=num_tokens, num_newest=num_newest))
