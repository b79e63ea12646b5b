"""Preference optimization (DPO, KTO): losses over whole completions, as coefficients of single tokens.

Such a loss is a function of a completion's implicit reward r = log policy(y | x) - log reference(y | x), a sum over its
tokens. The scoring pass gives every r, hence the derivative of the loss by each r. That number times the logprob, as
the loss of each token, has the gradient of the whole loss, independent of packing. Chosen or desirable completions have
advantage 1, rejected or undesirable ones -1; a pair shares its group. Coefficients include the weights of the loss: no
further aggregation (aggregation "sum").

Axes: E trained tokens of one update, Q sequences, P pairs.
"""

from __future__ import annotations

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat

from tunesmith.algorithms.losses.clipped import TokenLosses, TokenScores
from tunesmith.algorithms.scores import BatchScores, TokenTerms, sum_sequences
from tunesmith.metric import Count


def compute_dpo_terms(scores: BatchScores, *, beta: PositiveFloat = 0.1) -> TokenTerms:
    """Mean over pairs of -log sigmoid(beta (r_chosen - r_rejected)) (Rafailov et al., 2023, eq. 7).

    A completion without its partner in the update is not trained.
    """
    rewards_Q, labels_Q = compute_implicit_rewards(scores), find_labels(scores)
    chosen_P, rejected_P = find_pairs(scores.group_Q, labels_Q)
    margins_P = beta * (rewards_Q[chosen_P] - rewards_Q[rejected_P])
    slopes_P = beta * sigmoid(-margins_P) / max(len(margins_P), 1)
    slopes_Q, losses_Q = np.zeros(len(rewards_Q)), np.zeros(len(rewards_Q))
    slopes_Q[chosen_P], slopes_Q[rejected_P] = slopes_P, -slopes_P
    losses_Q[chosen_P] = np.logaddexp(0.0, -margins_P) / max(len(margins_P), 1)
    metrics: dict[str, float] = {"preference/num_pairs": Count(len(margins_P))}
    if len(margins_P):
        metrics |= {
            "preference/accuracy": float((margins_P > 0).mean()),
            "preference/margin": float(margins_P.mean()),
            "preference/chosen_reward": float(beta * rewards_Q[chosen_P].mean()),
            "preference/rejected_reward": float(beta * rewards_Q[rejected_P].mean()),
        }
    return _build_terms(scores, slopes_Q, losses_Q, metrics)


def compute_kto_terms(
    scores: BatchScores,
    *,
    beta: PositiveFloat = 0.1,
    desirable_weight: NonNegativeFloat = 1.0,
    undesirable_weight: NonNegativeFloat = 1.0,
) -> TokenTerms:
    """Mean over completions of weight (1 - v): Kahneman-Tversky optimization (Ethayarajh et al., 2024, eq. 7).

    v = sigmoid(beta (r - z)) of a desirable and sigmoid(beta (z - r)) of an undesirable completion. The reference point
    z estimates the KL of policy and reference: the mean r, clamped at 0, of *probes*, completions after the prompt of
    another row. Probes have advantage 0 and are not trained; without probes z is 0.
    """
    rewards_Q, labels_Q = compute_implicit_rewards(scores), find_labels(scores)
    probes_Q = rewards_Q[labels_Q == 0]
    reference_point = max(float(probes_Q.mean()), 0.0) if len(probes_Q) else 0.0
    num_labeled = max(int((labels_Q != 0).sum()), 1)
    weights_Q = np.where(labels_Q > 0, desirable_weight, undesirable_weight) * (labels_Q != 0) / num_labeled
    values_Q = sigmoid(beta * labels_Q * (rewards_Q - reference_point))
    slopes_Q = weights_Q * beta * labels_Q * values_Q * (1 - values_Q)
    metrics = {
        "preference/num_desirable": Count((labels_Q > 0).sum()),
        "preference/num_undesirable": Count((labels_Q < 0).sum()),
        "preference/reference_point": reference_point,
    }
    for name, label in (("desirable_reward", 1), ("undesirable_reward", -1)):
        if (labels_Q == label).any():
            metrics[f"preference/{name}"] = float(beta * rewards_Q[labels_Q == label].mean())
    return _build_terms(scores, slopes_Q, weights_Q * (1 - values_Q), metrics)


def compute_preference_losses(scores: TokenScores) -> TokenLosses:
    """The token's share of the loss as a constant, minus advantage times logprob for the gradient."""
    assert scores.constants_N is not None
    zero_N = scores.logprobs_N - scores.logprobs_N.detach()
    return TokenLosses(losses_N=scores.constants_N - scores.advantages_N * zero_N)


def compute_implicit_rewards(scores: BatchScores) -> np.ndarray:
    """log policy(y | x) - log reference(y | x) [Q] of each sequence."""
    assert scores.logprobs_E is not None and scores.reference_logprobs_E is not None
    return sum_sequences(scores.logprobs_E - scores.reference_logprobs_E, scores)


def find_labels(scores: BatchScores) -> np.ndarray:
    """1, -1 or 0 [Q]: the sign of each sequence's advantage."""
    labels_Q = np.zeros(scores.num_sequences)
    labels_Q[scores.sequence_E] = np.sign(scores.advantages_E)
    return labels_Q


def find_pairs(group_Q: np.ndarray, labels_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices [P] of the chosen and the rejected sequences, of the groups that have one of each."""
    chosen = {group: sequence for sequence, group in enumerate(group_Q.tolist()) if labels_Q[sequence] > 0}
    rejected = {group: sequence for sequence, group in enumerate(group_Q.tolist()) if labels_Q[sequence] < 0}
    groups = [group for group in chosen if group in rejected]
    return (
        np.asarray([chosen[group] for group in groups], dtype=np.int64),
        np.asarray([rejected[group] for group in groups], dtype=np.int64),
    )


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) without overflow."""
    return np.exp(-np.logaddexp(0.0, -values))


def _build_terms(
    scores: BatchScores, slopes_Q: np.ndarray, losses_Q: np.ndarray, metrics: dict[str, float]
) -> TokenTerms:
    """The slope of the sequence as the advantage of each token, and an equal share of the loss of the sequence."""
    length_Q = np.bincount(scores.sequence_E, minlength=scores.num_sequences)
    return TokenTerms(
        advantages_E=slopes_Q[scores.sequence_E],
        weights_E=np.ones(len(scores.sequence_E)),
        constants_E=(losses_Q / np.maximum(length_Q, 1))[scores.sequence_E],
        metrics=metrics,
    )
