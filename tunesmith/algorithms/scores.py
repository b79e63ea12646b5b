"""What an update knows of its trained tokens, and what it makes of that, before any loss is computed.

The scoring pass gives one number per token and kind. Pure functions over all tokens of the update (`compute_terms` in
the table) then make advantages and weights from them: ratios of whole sequences, returns, masks. After that every
token's loss depends on that token alone, so the gradient cannot depend on which tokens were computed together.

Axes: E trained tokens of the update, ordered by sequence, sample, time. Q sequences, each one trajectory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

import numpy as np

Need = Literal["logprobs", "reference", "teacher", "values", "experts", "baselines"]
"""What an algorithm may need besides its runs' rewards. Of the scoring pass: logprobs of the policy as it is now, of
the reference and of the teacher, and the critic's values. Of a step: demonstrations of experts, a greedy run a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScores:
    """All trained tokens of one update; float64."""

    old_logprobs_E: np.ndarray
    """Under the policy that losses compare with: the one that sampled the token or, where losses are multiplied by
    importance weights, the one that the step began with."""
    advantages_E: np.ndarray
    """What the advantage function gave."""
    sequence_E: np.ndarray
    """From 0 to Q - 1, never falling."""
    sample_E: np.ndarray
    """Which of the update's samples the token is in; a trajectory with branches has several."""
    time_E: np.ndarray
    """Position of the token in its sample."""
    group_Q: np.ndarray
    """Which group the sequence belongs to."""
    is_expert_Q: np.ndarray
    step: int = 0
    """Steps that the run took before this one."""
    logprobs_E: np.ndarray | None = None
    reference_logprobs_E: np.ndarray | None = None
    teacher_logprobs_E: np.ndarray | None = None
    values_E: np.ndarray | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.group_Q)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """What the loss of each token is made with."""

    advantages_E: np.ndarray
    weights_E: np.ndarray
    """Multiplies the token's policy loss; 0 masks it. The aggregation still counts masked tokens, so that a mask
    changes no other token's weight."""
    sequence_log_ratios_E: np.ndarray | None = None
    """Mean log-ratio of policy and old policy over the token's sequence."""
    constants_E: np.ndarray | None = None
    """A part of the token's loss that no gradient flows through."""
    returns_E: np.ndarray | None = None
    """What a critic learns."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the update, reported under these names; see `metric` for how they combine over updates."""


A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs(Generic[A]):
    """What the loss pass is given for each token, as arrays or as tensors."""

    weights_E: A
    """Share of the token in the loss of the whole update."""
    correction_E: A
    """Multiplies the token's policy loss, but neither its KL nor its entropy."""
    advantages_E: A
    old_logprobs_E: A
    sampler_logprobs_E: A
    is_newest_E: A
    """1 where the newest policy sampled the token: there sampler and trainer must agree."""
    is_expert_E: A | None = None
    """1 where the token was given by an expert."""
    sequence_log_ratios_E: A | None = None
    constants_E: A | None = None
    reference_logprobs_E: A | None = None
    is_real_E: A | None = None
    """0 where a token only fills a place up and has no weight; None: all are real."""

    def convert(self, function: Callable[[A], B]) -> TokenInputs[B]:
        """Apply a function to every field that is there."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        converted: dict[str, Any] = {name: None if value is None else function(value) for name, value in given.items()}
        return TokenInputs(**converted)


def keep_advantages(scores: BatchScores) -> TokenTerms:
    """The advantages as they are, every token with weight 1."""
    return TokenTerms(advantages_E=scores.advantages_E, weights_E=np.ones(len(scores.advantages_E)))


def sum_sequences(values_E: np.ndarray, scores: BatchScores) -> np.ndarray:
    """The sum [Q] over each sequence."""
    return np.bincount(scores.sequence_E, weights=values_E, minlength=scores.num_sequences)


def mean_sequences(values_E: np.ndarray, scores: BatchScores) -> np.ndarray:
    """The mean [Q] over each sequence."""
    return sum_sequences(values_E, scores) / np.bincount(scores.sequence_E, minlength=scores.num_sequences)
