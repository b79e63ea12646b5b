"""Whether the inputs of a token's loss depend on that token alone, or on other tokens of the update."""

from __future__ import annotations

from tunesmith.algorithms.algorithm import Algorithm


def can_weigh_in_loss_pass(algorithm: Algorithm) -> bool:
    """Whether importance weights depend on the token alone, and nothing else needs logprobs before the loss pass."""
    correction = algorithm.correction
    return (
        algorithm.keeps_advantages
        and correction.importance != "sequence"
        and correction.mask is None
        and "logprobs" not in algorithm.needs
    )


def has_own_inputs(algorithm: Algorithm) -> bool:
    """Whether all inputs of fresh tokens, but for the counts that the loss is divided by, are those of each token."""
    correction = algorithm.correction
    return (
        algorithm.keeps_advantages
        and correction.mask is None
        and correction.negative_sequence_delta is None
        and algorithm.top_entropy_fraction == 1
    )
