"""Losses over whole completions: DPO and its forms, KTO, and without a reference model ORPO and SimPO.

A completion's implicit reward r = log policy(y | x) - log reference(y | x), a sum over its tokens. The scoring pass
gives every r, hence the derivative of the loss by each r. That number times the logprob, as the loss of each token, has
the gradient of the whole loss, independent of packing. Chosen or desirable completions have advantage 1, rejected or
undesirable ones -1; a pair shares its group. Coefficients include the weights of the loss: no further aggregation
(aggregation "sum"). The losses without a reference depend on a, the mean logprob of the tokens of a completion.

Axes: E trained tokens of one update, Q sequences, P pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from tunesmith.algorithms.scores import TokenInputs, TokenLosses, TokenScores, average, sum_sequences
from tunesmith.errors import ConfigError
from tunesmith.metric import Count

DpoLossType = Literal["sigmoid", "hinge", "ipo", "robust"]
FlipRate = Annotated[float, Field(ge=0, lt=0.5)]


def compute_dpo_terms(
    tokens: TokenInputs,
    *,
    beta: PositiveFloat = 0.1,
    loss_type: DpoLossType = "sigmoid",
    label_smoothing: FlipRate = 0.0,
    has_length_norm: bool = False,
) -> TokenInputs:
    """Mean over pairs of a loss of d = r_chosen - r_rejected (Rafailov et al., 2023, DPO, eq. 7, and later forms).

    With m = beta d and e = `label_smoothing`, the assumed share of pairs whose labels are swapped:

    - sigmoid: -log sigmoid(m); with e above 0 conservative DPO, -(1 - e) log sigmoid(m) - e log sigmoid(-m) (Mitchell,
      2023, "A note on DPO with noisy preferences");
    - robust: (-(1 - e) log sigmoid(m) + e log sigmoid(-m)) / (1 - 2 e), whose expectation over swapped labels is the
      loss of the true labels (Chowdhury et al., 2024);
    - hinge: max(0, 1 - m) (Zhao et al., 2023, SLiC; Liu et al., 2024, RSO);
    - ipo: (d - 1 / (2 beta))^2, with a finite optimum (Azar et al., 2024, IPO, eq. 17).

    `has_length_norm` divides each r by the number of tokens of its completion, as TRL does for ipo; in the papers r is
    a sum. A completion without its partner in the update is not trained.
    """
    _check_label_smoothing(loss_type, label_smoothing)
    rewards_Q = compute_implicit_rewards(tokens)
    scale_Q = 1 / count_tokens(tokens) if has_length_norm else np.ones(len(rewards_Q))
    rewards_Q = rewards_Q * scale_Q
    chosen_P, rejected_P = find_pairs(tokens)
    gaps_P = rewards_Q[chosen_P] - rewards_Q[rejected_P]
    losses_P, slopes_P = compute_pair_losses(gaps_P, beta=beta, loss_type=loss_type, label_smoothing=label_smoothing)
    names = ("preference/chosen_reward", "preference/rejected_reward")
    return _build_pair_terms(
        tokens,
        chosen_P,
        rejected_P,
        losses_P=losses_P,
        chosen_slopes_P=slopes_P * scale_Q[chosen_P],
        rejected_slopes_P=-slopes_P * scale_Q[rejected_P],
        metrics=_describe_pairs(beta * rewards_Q, chosen_P, rejected_P, beta * gaps_P, names),
    )


def compute_pair_losses(
    gaps_P: np.ndarray, *, beta: float, loss_type: DpoLossType, label_smoothing: float
) -> tuple[np.ndarray, np.ndarray]:
    """The share of each pair in the mean loss, and minus its derivative by the gap."""
    num_pairs, margins_P = max(len(gaps_P), 1), beta * gaps_P
    if loss_type == "hinge":
        return np.maximum(1 - margins_P, 0.0) / num_pairs, np.where(margins_P < 1, beta, 0.0) / num_pairs
    if loss_type == "ipo":
        errors_P = gaps_P - 1 / (2 * beta)
        return errors_P**2 / num_pairs, -2 * errors_P / num_pairs
    kept, flipped = 1 - label_smoothing, label_smoothing
    if loss_type == "robust":
        kept, flipped = kept / (1 - 2 * label_smoothing), -flipped / (1 - 2 * label_smoothing)
    losses_P = kept * np.logaddexp(0.0, -margins_P) + flipped * np.logaddexp(0.0, margins_P)
    slopes_P = beta * (kept * sigmoid(-margins_P) - flipped * sigmoid(margins_P))
    return losses_P / num_pairs, slopes_P / num_pairs


def _check_label_smoothing(loss_type: DpoLossType, label_smoothing: float) -> None:
    if loss_type == "robust" and label_smoothing == 0:
        raise ConfigError("loss_type='robust' of 'dpo' equals sigmoid with label_smoothing=0: set label_smoothing")
    if loss_type in ("hinge", "ipo") and label_smoothing > 0:
        raise ConfigError(
            f"label_smoothing={label_smoothing:g} has no effect with loss_type={loss_type!r} of 'dpo': leave it out, "
            "or choose sigmoid or robust"
        )


def compute_kto_terms(
    tokens: TokenInputs,
    *,
    beta: PositiveFloat = 0.1,
    desirable_weight: NonNegativeFloat = 1.0,
    undesirable_weight: NonNegativeFloat = 1.0,
) -> TokenInputs:
    """Mean over completions of weight (1 - v): Kahneman-Tversky optimization (Ethayarajh et al., 2024, eq. 7).

    v = sigmoid(beta (r - z)) of a desirable and sigmoid(beta (z - r)) of an undesirable completion. The reference point
    z estimates the KL of policy and reference: the mean r, clamped at 0, of *probes*, completions after the prompt of
    another row. Probes have advantage 0 and are not trained; without probes z is 0.
    """
    rewards_Q, labels_Q = compute_implicit_rewards(tokens), find_labels(tokens)
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
            metrics[f"preference/{name}"] = average(beta * rewards_Q[labels_Q == label])
    return build_terms(tokens, slopes_Q, weights_Q * (1 - values_Q), metrics)


def compute_preference_losses(scores: TokenScores) -> TokenLosses:
    """The token's share of the loss as a constant, minus advantage times logprob for the gradient."""
    assert scores.constants_N is not None
    zero_N = scores.logprobs_N - scores.logprobs_N.detach()
    return TokenLosses(losses_N=scores.constants_N - scores.advantages_N * zero_N)


def compute_implicit_rewards(tokens: TokenInputs) -> np.ndarray:
    """log policy(y | x) - log reference(y | x) [Q] of each sequence."""
    assert tokens.logprobs_E is not None and tokens.reference_logprobs_E is not None
    return sum_sequences(tokens.logprobs_E - tokens.reference_logprobs_E, tokens)


def find_labels(tokens: TokenInputs) -> np.ndarray:
    """1, -1 or 0 [Q]: the sign of each sequence's advantage."""
    labels_Q = np.zeros(tokens.num_sequences)
    labels_Q[tokens.sequence_E] = np.sign(tokens.advantages_E)
    return labels_Q


def find_pairs(tokens: TokenInputs) -> tuple[np.ndarray, np.ndarray]:
    """Indices [P] of the chosen and the rejected sequences, of the groups that have one of each."""
    group_Q, labels_Q = tokens.find_groups().tolist(), find_labels(tokens)
    chosen = {group: sequence for sequence, group in enumerate(group_Q) if labels_Q[sequence] > 0}
    rejected = {group: sequence for sequence, group in enumerate(group_Q) if labels_Q[sequence] < 0}
    groups = [group for group in chosen if group in rejected]
    return (
        np.asarray([chosen[group] for group in groups], dtype=np.int64),
        np.asarray([rejected[group] for group in groups], dtype=np.int64),
    )


def count_tokens(tokens: TokenInputs) -> np.ndarray:
    """Trained tokens [Q] of each sequence, at least 1."""
    return np.maximum(np.bincount(tokens.sequence_E, minlength=tokens.num_sequences), 1)


def sigmoid(values: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) without overflow."""
    return np.exp(-np.logaddexp(0.0, -values))


def build_terms(
    tokens: TokenInputs, slopes_Q: np.ndarray, losses_Q: np.ndarray, metrics: dict[str, float]
) -> TokenInputs:
    """The slope of the sequence as the advantage of each token, and an equal share of the loss of the sequence."""
    return replace(
        tokens,
        advantages_E=slopes_Q[tokens.sequence_E],
        constants_E=(losses_Q / count_tokens(tokens))[tokens.sequence_E],
        metrics=metrics,
    )


MAX_MEAN_LOGPROB = -1e-6
"""Upper bound of a in odds, which are infinite at a = 0."""


def compute_simpo_terms(
    tokens: TokenInputs, *, beta: PositiveFloat = 2.0, gamma: NonNegativeFloat = 1.0
) -> TokenInputs:
    """Mean over pairs of -log sigmoid(beta (a_chosen - a_rejected) - gamma) (Meng et al., 2024, SimPO, eq. 6).

    `gamma` is the margin by which the reward beta a of the chosen completion should exceed that of the rejected one.
    The defaults are from the ranges that the paper searched; TRL's `simpo_gamma` is the same gamma.
    """
    means_Q, (chosen_P, rejected_P), counts_Q = _average_logprobs(tokens), find_pairs(tokens), count_tokens(tokens)
    margins_P = beta * (means_Q[chosen_P] - means_Q[rejected_P])
    num_pairs = max(len(margins_P), 1)
    losses_P = np.logaddexp(0.0, gamma - margins_P) / num_pairs
    slopes_P = beta * sigmoid(gamma - margins_P) / num_pairs
    return _build_pair_terms(
        tokens,
        chosen_P,
        rejected_P,
        losses_P=losses_P,
        chosen_slopes_P=slopes_P / counts_Q[chosen_P],
        rejected_slopes_P=-slopes_P / counts_Q[rejected_P],
        metrics=_describe_pairs(means_Q, chosen_P, rejected_P, margins_P),
    )


def compute_orpo_terms(tokens: TokenInputs, *, odds_coef: NonNegativeFloat = 0.1) -> TokenInputs:
    """Mean over pairs of -a_chosen - odds_coef log sigmoid(o_chosen - o_rejected) (Hong et al., 2024, ORPO, eq. 6, 7).

    o = a - log(1 - e^a) is the log odds of a completion, whose probability is the geometric mean over its tokens
    (eq. 3, 4). The first term is cross entropy of the chosen completion, each pair with the same weight. TRL averages
    that term over all tokens of the batch, prompts included, and calls `odds_coef` beta.
    """
    means_Q, (chosen_P, rejected_P), counts_Q = _average_logprobs(tokens), find_pairs(tokens), count_tokens(tokens)
    odds_Q, odds_slopes_Q = compute_log_odds(means_Q)
    gaps_P = odds_Q[chosen_P] - odds_Q[rejected_P]
    num_pairs = max(len(gaps_P), 1)
    slopes_P = odds_coef * sigmoid(-gaps_P) / num_pairs
    metrics = _describe_pairs(means_Q, chosen_P, rejected_P, gaps_P)
    if len(gaps_P):
        metrics["preference/sft_loss"] = average(-means_Q[chosen_P])
    return _build_pair_terms(
        tokens,
        chosen_P,
        rejected_P,
        losses_P=(odds_coef * np.logaddexp(0.0, -gaps_P) - means_Q[chosen_P]) / num_pairs,
        chosen_slopes_P=(1 / num_pairs + slopes_P * odds_slopes_Q[chosen_P]) / counts_Q[chosen_P],
        rejected_slopes_P=-slopes_P * odds_slopes_Q[rejected_P] / counts_Q[rejected_P],
        metrics=metrics,
    )


def compute_log_odds(means_Q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The log odds a - log(1 - e^a), and their derivative 1 / (1 - e^a)."""
    bounded_Q = np.minimum(means_Q, MAX_MEAN_LOGPROB)
    complement_Q = -np.expm1(bounded_Q)
    return bounded_Q - np.log(complement_Q), 1 / complement_Q


def _average_logprobs(tokens: TokenInputs) -> np.ndarray:
    """Mean logprob [Q] of the tokens of each sequence."""
    assert tokens.logprobs_E is not None
    return sum_sequences(tokens.logprobs_E, tokens) / count_tokens(tokens)


def _describe_pairs(
    values_Q: np.ndarray, chosen_P: np.ndarray, rejected_P: np.ndarray, margins_P: np.ndarray,
    names: tuple[str, str] = ("preference/chosen_logprob", "preference/rejected_logprob"),
) -> dict[str, float]:  # fmt: skip
    metrics: dict[str, float] = {"preference/num_pairs": Count(len(margins_P))}
    if len(margins_P):
        metrics |= {
            "preference/accuracy": average(margins_P > 0),
            "preference/margin": average(margins_P),
            names[0]: average(values_Q[chosen_P]),
            names[1]: average(values_Q[rejected_P]),
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
    """Terms from the loss of each pair, and minus its derivatives by the logprob of a token of each of the two."""
    slopes_Q, losses_Q = np.zeros((2, tokens.num_sequences))
    slopes_Q[chosen_P], slopes_Q[rejected_P], losses_Q[chosen_P] = chosen_slopes_P, rejected_slopes_P, losses_P
    return build_terms(tokens, slopes_Q, losses_Q, metrics)
