"""Preference losses without a reference model: ORPO and SimPO.

As in `preference`, the scoring pass gives the logprobs of whole completions, and the loss of a token is the derivative
of the loss by the logprob of its completion, times its own logprob. Both losses depend on a, the mean logprob of the
tokens of a completion.

Axes: Q sequences, P pairs.
"""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from tunesmith.algorithms.losses.preference import (
    build_terms,
    count_tokens,
    find_labels,
    find_pairs,
    sigmoid,
    spread_pairs,
)
from tunesmith.algorithms.scores import TokenInputs, sum_sequences
from tunesmith.metric import Count

MAX_MEAN_LOGPROB = -1e-6
"""Upper bound of a in odds, which are infinite at a = 0."""


def compute_simpo_terms(
    tokens: TokenInputs, *, beta: PositiveFloat = 2.0, gamma: NonNegativeFloat = 1.0
) -> TokenInputs:
    """Mean over pairs of -log sigmoid(beta (a_chosen - a_rejected) - gamma) (Meng et al., 2024, SimPO, eq. 6).

    `gamma` is the margin by which the reward beta a of the chosen completion should exceed that of the rejected one.
    The defaults are from the ranges that the paper searched; TRL's `simpo_gamma` is the same gamma.
    """
    means_Q, chosen_P, rejected_P = _compare_pairs(tokens)
    margins_P = beta * (means_Q[chosen_P] - means_Q[rejected_P])
    num_pairs = max(len(margins_P), 1)
    losses_P = np.logaddexp(0.0, gamma - margins_P) / num_pairs
    slopes_P = beta * sigmoid(gamma - margins_P) / num_pairs
    return _build_pair_terms(
        tokens,
        chosen_P,
        rejected_P,
        losses_P=losses_P,
        chosen_slopes_P=slopes_P,
        rejected_slopes_P=-slopes_P,
        metrics=_describe_pairs(means_Q, chosen_P, rejected_P, margins_P),
    )


def compute_orpo_terms(tokens: TokenInputs, *, odds_coef: NonNegativeFloat = 0.1) -> TokenInputs:
    """Mean over pairs of -a_chosen - odds_coef log sigmoid(o_chosen - o_rejected) (Hong et al., 2024, ORPO, eq. 6, 7).

    o = a - log(1 - e^a) is the log odds of a completion, whose probability is the geometric mean over its tokens
    (eq. 3, 4). The first term is cross entropy of the chosen completion, each pair with the same weight. TRL averages
    that term over all tokens of the batch, prompts included, and calls `odds_coef` beta.
    """
    means_Q, chosen_P, rejected_P = _compare_pairs(tokens)
    odds_Q, odds_slopes_Q = compute_log_odds(means_Q)
    gaps_P = odds_Q[chosen_P] - odds_Q[rejected_P]
    num_pairs = max(len(gaps_P), 1)
    slopes_P = odds_coef * sigmoid(-gaps_P) / num_pairs
    metrics = _describe_pairs(means_Q, chosen_P, rejected_P, gaps_P)
    if len(gaps_P):
        metrics["preference/sft_loss"] = float(-means_Q[chosen_P].mean())
    return _build_pair_terms(
        tokens,
        chosen_P,
        rejected_P,
        losses_P=(odds_coef * np.logaddexp(0.0, -gaps_P) - means_Q[chosen_P]) / num_pairs,
        chosen_slopes_P=1 / num_pairs + slopes_P * odds_slopes_Q[chosen_P],
        rejected_slopes_P=-slopes_P * odds_slopes_Q[rejected_P],
        metrics=metrics,
    )


def compute_log_odds(means_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The log odds a - log(1 - e^a), and their derivative 1 / (1 - e^a)."""
    bounded_Q = np.minimum(means_Q, MAX_MEAN_LOGPROB)
    complement_Q = -np.expm1(bounded_Q)
    return bounded_Q - np.log(complement_Q), 1 / complement_Q


def _compare_pairs(tokens: TokenInputs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean logprob [Q] of the tokens of each sequence, and the indices [P] of the pairs."""
    assert tokens.logprobs_E is not None
    chosen_P, rejected_P = find_pairs(tokens.find_groups(), find_labels(tokens))
    return sum_sequences(tokens.logprobs_E, tokens) / np.maximum(count_tokens(tokens), 1), chosen_P, rejected_P


def _describe_pairs(
    means_Q: np.ndarray, chosen_P: np.ndarray, rejected_P: np.ndarray, margins_P: np.ndarray
) -> dict[str, float]:
    metrics: dict[str, float] = {"preference/num_pairs": Count(len(margins_P))}
    if len(margins_P):
        metrics |= {
            "preference/accuracy": float((margins_P > 0).mean()),
            "preference/margin": float(margins_P.mean()),
            "preference/chosen_logprob": float(means_Q[chosen_P].mean()),
            "preference/rejected_logprob": float(means_Q[rejected_P].mean()),
        }
    return metrics


def _build_pair_terms(
    tokens: TokenInputs,
    chosen_P: np.ndarray,
    rejected_P: np.ndarray,
    *,
    losses_P: np.ndarray,
    chosen_slopes_P: np.ndarray,
    rejected_slopes_P: np.ndarray,
    metrics: dict[str, float],
) -> TokenInputs:
    """Terms from the loss of each pair and minus its derivatives by the mean logprobs."""
    slopes_Q = spread_pairs(tokens, chosen_P, rejected_P, chosen=chosen_slopes_P, rejected=rejected_slopes_P)
    losses_Q = spread_pairs(tokens, chosen_P, rejected_P, chosen=losses_P)
    return build_terms(tokens, slopes_Q / np.maximum(count_tokens(tokens), 1), losses_Q, metrics)
