"""What is known of the trained tokens of an update, and what a loss function gets of them.

`TokenInputs` has one column for each fact. Columns are filled in this order: from the samples, by the scoring pass, by
the algorithm's function of all tokens (`compute_terms` in the table: sequence ratios, returns, masks), by aggregation
and correction. After that the loss of a token depends on that token alone, so the gradient does not depend on how
tokens are split into rows and chunks. The loss pass adds the logprobs of its forward: `TokenScores`.

The loss of the batch is the sum of weight times token loss. The weights of the aggregation are computed before the
forward pass, from counts over the whole batch. A sequence is a trajectory: its samples, branches included, count as
one, and only its sampled tokens count.

Axes: E trained tokens of the update, ordered by sequence, sample, time. Q sequences, each one trajectory. N tokens of a
chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from tunesmith.metric import Mean

Need = Literal["logprobs", "entropies", "reference", "teacher", "values", "experts", "baselines", "reward_parts"]
"""What an algorithm may need besides rewards. From the scoring pass: logprobs and entropies of the current policy,
logprobs of the reference or the teacher, values of the critic. From the step: demonstrations of experts, a greedy
rollout of each task, metrics of the judge that are rewards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """All trained tokens of an update before the loss pass; float64 unless said otherwise.

    A column is None until it is computed, and for good if the algorithm does not need it.
    """

    old_logprobs_E: np.ndarray
    """Under the old policy, the denominator of the ratio in the loss: the policy that sampled the token or, with
    importance weights, the proximal policy (see `corrections`)."""
    advantages_E: np.ndarray
    """Of the advantage function; after `compute_terms`, of the loss."""
    sequence_E: np.ndarray
    """Index of the sequence, 0 to Q - 1."""
    group_E: np.ndarray
    """Index of the group."""
    is_expert_E: np.ndarray | None = None
    """True for expert tokens; None: there are none."""
    sampler_logprobs_E: np.ndarray | None = None
    """Under the policy that sampled the token, as recorded."""
    proximal_logprobs_E: np.ndarray | None = None
    """Under the policy at the start of the step; the sampler's if that was not scored."""
    is_newest_E: np.ndarray | None = None
    """1 where the newest policy version sampled the token, so that sampler and trainer must agree."""
    is_unmoved_E: np.ndarray | None = None
    """True where the policy still is the old one, so that log-ratios are 0 but for rounding; None: nowhere."""

    logprobs_E: np.ndarray | None = None
    """Under the current policy, by the scoring pass."""
    entropies_E: np.ndarray | None = None
    """Of the current policy's sampling distribution at the token, in nats."""
    reference_logprobs_E: np.ndarray | None = None
    teacher_logprobs_E: np.ndarray | None = None
    values_E: np.ndarray | None = None

    correction_E: np.ndarray | None = None
    """Factor of the token's policy loss, not of its KL or entropy; 0 masks it, None is 1 everywhere. Aggregation still
    counts masked tokens, so a mask does not change the weight of other tokens."""
    sequence_log_ratios_E: np.ndarray | None = None
    """Mean log-ratio of policy and old policy over the token's sequence."""
    constants_E: np.ndarray | None = None
    """Constant part of the token's loss, without gradient."""
    is_selected_E: np.ndarray | None = None
    """True for tokens that the loss function treats separately: the algorithm's loss function defines how."""
    returns_E: np.ndarray | None = None
    """Targets of the critic."""
    weights_E: np.ndarray | None = None
    """Aggregation weight of the token in the loss of the update."""
    importance_caps_E: np.ndarray | None = None
    """Upper bounds of importance weights that the loss pass computes from its own logprobs, which then are those of the
    proximal policy; 0 for weight 1. None: `correction_E` has the weights, if any."""

    step: int = 0
    """Training steps of the run before this one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the update by `compute_terms`; `metric` defines how they are reduced over updates."""

    @property
    def num_sequences(self) -> int:
        return int(self.sequence_E.max(initial=-1)) + 1

    def find_groups(self) -> np.ndarray:
        """Index [Q] of the group of each sequence."""
        return self.group_E[np.unique(self.sequence_E, return_index=True)[1]]

    def find_sampled(self) -> np.ndarray:
        """True [E] for the policy's own tokens, False for those of experts."""
        return np.ones(len(self.sequence_E), dtype=bool) if self.is_expert_E is None else ~self.is_expert_E

    def list_columns(self) -> dict[str, np.ndarray]:
        columns = {each.name: getattr(self, each.name) for each in fields(self) if each.name.endswith("_E")}
        return {name: column_E for name, column_E in columns.items() if column_E is not None}

    def convert(self, function: Callable[[np.ndarray], np.ndarray]) -> TokenInputs:
        """Apply a function, such as a choice of tokens, to every column that is not None."""
        converted: dict[str, Any] = {name: function(column_E) for name, column_E in self.list_columns().items()}
        return replace(self, **converted)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Inputs of a loss function; the columns of `TokenInputs` of the same names, and the logprobs of the loss pass."""

    logprobs_N: Tensor
    """Under the current policy, with gradient."""
    old_logprobs_N: Tensor
    """Under the old policy: the sampling policy or the proximal one, see `TokenInputs`."""
    advantages_N: Tensor
    sequence_log_ratios_N: Tensor | None = None
    """Mean log-ratio of policy and old policy over the token's sequence."""
    constants_N: Tensor | None = None
    """Constant part of the loss, without gradient."""
    is_selected_N: Tensor | None = None
    """1 for the tokens that `compute_terms` selected."""
    is_expert_N: Tensor | None = None
    """1 for expert tokens; None if there are none, except in an algorithm with demonstrations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """One loss per token, and per-token metrics that are averaged over the batch."""

    losses_N: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def keep_advantages(tokens: TokenInputs) -> TokenInputs:
    """No terms: the advantages are those of the advantage function, and nothing is masked."""
    return tokens


def sum_sequences(values_E: np.ndarray, tokens: TokenInputs) -> np.ndarray:
    """Sum [Q] over each sequence."""
    return np.bincount(tokens.sequence_E, weights=values_E, minlength=tokens.num_sequences)


def mean_sequences(values_E: np.ndarray, tokens: TokenInputs) -> np.ndarray:
    """Mean [Q] over each sequence."""
    return sum_sequences(values_E, tokens) / np.bincount(tokens.sequence_E, minlength=tokens.num_sequences)


def average(values_E: np.ndarray) -> Mean:
    """The mean over tokens, or over whatever the values are of, as a metric; the updates of a step weigh it by their
    numbers of values. 0 of no values."""
    return Mean(float(values_E.sum()), over=max(len(values_E), 1))


Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum"]


def compute_token_weights(trajectory_E: np.ndarray, *, aggregation: Aggregation, norm_length: int) -> np.ndarray:
    """Weights [E] (float64) of tokens whose trajectories are `trajectory_E`.

    token-mean: the mean over tokens. seq-mean-token-sum: the mean over sequences of their sums. seq-mean-token-mean:
    the mean over sequences of their means. seq-mean-token-sum-norm: the mean over sequences of sum / `norm_length`, a
    constant (`algorithm.norm_length`), so that it does not depend on the longest answer of a batch (Liu et al., 2025,
    "Understanding R1-Zero-like training", section 3.2). sum: the sum, for losses that include their weights.
    """
    _, sequence_E, length_Q = np.unique(trajectory_E, return_inverse=True, return_counts=True)
    num_tokens, num_sequences = len(trajectory_E), len(length_Q)
    divisors: dict[Aggregation, int | np.ndarray] = {
        "token-mean": num_tokens,
        "seq-mean-token-sum": num_sequences,
        "seq-mean-token-mean": num_sequences * length_Q[sequence_E],
        "seq-mean-token-sum-norm": num_sequences * norm_length,
        "sum": 1,
    }
    return np.ones(num_tokens) / divisors[aggregation]
