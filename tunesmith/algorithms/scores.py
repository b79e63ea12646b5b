"""Inputs and outputs of the functions over all trained tokens of an update (`compute_terms` in the table).

The scoring pass gives logprobs and values of every token. Pure functions then compute what depends on whole sequences
or on the whole update: sequence ratios, returns, masks. After that the loss of a token depends on that token alone, so
the gradient does not depend on how tokens are split into rows and chunks.

Axes: E trained tokens of the update, ordered by sequence, sample, time. Q sequences, each one trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

import numpy as np

Need = Literal["logprobs", "entropies", "reference", "teacher", "values", "experts", "baselines", "reward_parts"]
"""What an algorithm may need besides rewards. From the scoring pass: logprobs and entropies of the current policy,
logprobs of the reference or the teacher, values of the critic. From the step: demonstrations of experts, a greedy
rollout of each task, metrics of the judge that are rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScores:
    """All trained tokens of one update; float64."""

    old_logprobs_E: np.ndarray
    """Under the old policy, the denominator of the ratio in the loss: the policy that sampled the token or, with
    importance weights, the proximal policy (see `corrections`)."""
    advantages_E: np.ndarray
    """From the advantage function."""
    sequence_E: np.ndarray
    """Index of the sequence, 0 to Q - 1, non-decreasing."""
    group_Q: np.ndarray
    """Index of the group."""
    is_expert_Q: np.ndarray
    step: int = 0
    """Training steps of the run before this one."""
    logprobs_E: np.ndarray | None = None
    entropies_E: np.ndarray | None = None
    """Of the current policy's sampling distribution at the token, in nats."""
    reference_logprobs_E: np.ndarray | None = None
    teacher_logprobs_E: np.ndarray | None = None
    values_E: np.ndarray | None = None
    is_unmoved_E: np.ndarray | Literal[False] = False
    """True where the policy still is the old one, so that log-ratios are 0 but for rounding; False: nowhere."""

    @property
    def num_sequences(self) -> int:
        return len(self.group_Q)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Per-token inputs of the loss, computed from `BatchScores`."""

    advantages_E: np.ndarray
    weights_E: np.ndarray
    """Factor of the token's policy loss; 0 masks it. Aggregation still counts masked tokens, so a mask does not change
    the weight of other tokens."""
    sequence_log_ratios_E: np.ndarray | None = None
    """Mean log-ratio of policy and old policy over the token's sequence."""
    constants_E: np.ndarray | None = None
    """Constant part of the token's loss, without gradient."""
    is_selected_E: np.ndarray | None = None
    """True for tokens that the loss function treats separately: the algorithm's loss function defines how."""
    returns_E: np.ndarray | None = None
    """Targets of the critic."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the update; `metric` defines how they are reduced over updates."""


A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs(Generic[A]):
    """Per-token inputs of the loss pass, as arrays or tensors."""

    weights_E: A
    """Aggregation weight of the token in the loss of the update."""
    correction_E: A
    """Factor of the token's policy loss, not of its KL or entropy."""
    advantages_E: A
    old_logprobs_E: A
    sampler_logprobs_E: A
    is_newest_E: A
    """1 where the newest policy version sampled the token, so that sampler and trainer must agree."""
    is_expert_E: A | None = None
    """1 for expert tokens."""
    sequence_log_ratios_E: A | None = None
    constants_E: A | None = None
    is_selected_E: A | None = None
    """1 for the tokens that `compute_terms` selected."""
    reference_logprobs_E: A | None = None
    importance_caps_E: A | None = None
    """Upper bounds of importance weights that the loss pass computes from its own logprobs, which then are those of the
    proximal policy; 0 for weight 1. None: `correction_E` has the weights, if any."""
    is_real_E: A | None = None
    """0 for padding, which has no weight; None: no padding."""

    def convert(self, function: Callable[[A], B]) -> TokenInputs[B]:
        """Apply a function to every field that is not None."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        converted: dict[str, Any] = {name: None if value is None else function(value) for name, value in values.items()}
        return TokenInputs(**converted)


def keep_advantages(scores: BatchScores) -> TokenTerms:
    """The unchanged advantages, with weight 1 for every token."""
    return TokenTerms(advantages_E=scores.advantages_E, weights_E=np.ones(len(scores.advantages_E)))


def sum_sequences(values_E: np.ndarray, scores: BatchScores) -> np.ndarray:
    """Sum [Q] over each sequence."""
    return np.bincount(scores.sequence_E, weights=values_E, minlength=scores.num_sequences)


def mean_sequences(values_E: np.ndarray, scores: BatchScores) -> np.ndarray:
    """Mean [Q] over each sequence."""
    return sum_sequences(values_E, scores) / np.bincount(scores.sequence_E, minlength=scores.num_sequences)
