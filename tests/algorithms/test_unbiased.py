"""The expected policy gradient by enumeration: three tokens, sequences of two, every group of two or three."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tunesmith.algorithms.advantages.baselines import compute_reinforce_advantages, compute_rloo_advantages
from tunesmith.algorithms.advantages.group import (
    RunOutcome,
    compute_dr_grpo_advantages,
    compute_maxrl_advantages,
    compute_multi_step_grpo_advantages,
    compute_pass_at_k_advantages,
)
from tunesmith.algorithms.losses.policy import (
    compute_importance_sampling_losses,
    compute_ppo_clip_losses,
    compute_reinforce_losses,
)
from tunesmith.algorithms.scores import TokenScores

SEQUENCES = list(itertools.product(range(3), repeat=2))
REWARDS = [0.1 * first * second - 0.5 * (first == second) + 0.3 * second for first, second in SEQUENCES]
HUGE = 1e9
"""As epsilon it makes the advantage (R - mean) / HUGE, independent of the std."""


def compute_token_logprobs(logits: Tensor, sequence: tuple[int, ...]) -> Tensor:
    """The second token's logits depend on the first token."""
    first, second = sequence
    logp = logits.log_softmax(-1)
    return torch.stack([logp[0, first], logp[1 + first, second]])


def compute_exact_gradient(logits: Tensor) -> Tensor:
    logits = logits.clone().requires_grad_()
    probs = torch.stack([compute_token_logprobs(logits, sequence).sum().exp() for sequence in SEQUENCES])
    (probs * torch.tensor(REWARDS)).sum().backward()
    return logits.grad


def compute_expected_gradient(
    logits: Tensor, compute_advantages, compute_losses, *, rewards=REWARDS, group_size: int = 2
) -> Tensor:
    """Expectation over every group of sequences."""
    total = torch.zeros_like(logits)
    for pair in itertools.product(range(len(SEQUENCES)), repeat=group_size):
        outcomes = [RunOutcome(reward=rewards[index], num_turns=1) for index in pair]
        probability = torch.stack([compute_token_logprobs(logits, SEQUENCES[i]).sum() for i in pair]).sum().exp()
        for index, advantage in zip(pair, compute_advantages([outcomes])[0], strict=True):
            if advantage is None:
                continue
            x = logits.clone().requires_grad_()
            logprobs = compute_token_logprobs(x, SEQUENCES[index])
            old_logprobs = compute_token_logprobs(logits, SEQUENCES[index])
            scores = TokenScores(
                logprobs_N=logprobs,
                old_logprobs_N=old_logprobs,
                advantages_N=torch.full_like(old_logprobs, advantage),
            )
            compute_losses(scores).losses_N.sum().backward()
            total -= probability * x.grad / len(pair)
    return total


def build_logits() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3, dtype=torch.float64)


def assert_unbiased(found: Tensor, logits: Tensor, *, factor: float = 1.0) -> None:
    torch.testing.assert_close(found, factor * compute_exact_gradient(logits), rtol=1e-7, atol=1e-9)


def test_group_relative_policy_gradient_is_unbiased_up_to_its_known_factor():
    """With its own reward in the group's mean, the expected gradient is (G - 1) / G times that of the mean reward."""

    def compute_advantages(groups):
        rows = compute_multi_step_grpo_advantages(groups, epsilon=HUGE)
        return [[None if value is None else value * HUGE for value in row] for row in rows]

    logits = build_logits()
    assert_unbiased(compute_expected_gradient(logits, compute_advantages, compute_ppo_clip_losses), logits, factor=0.5)
    found = compute_expected_gradient(logits, compute_dr_grpo_advantages, compute_ppo_clip_losses)
    assert_unbiased(found, logits, factor=0.5)


def test_leave_one_out_and_plain_reinforce_are_unbiased():
    logits = build_logits()
    for compute_losses in (compute_ppo_clip_losses, compute_reinforce_losses, compute_importance_sampling_losses):
        for compute_advantages in (compute_rloo_advantages, compute_reinforce_advantages):
            assert_unbiased(compute_expected_gradient(logits, compute_advantages, compute_losses), logits)


def test_a_constant_baseline_does_not_change_the_expected_gradient():
    logits = build_logits()

    def compute_advantages(groups):
        return compute_reinforce_advantages(groups, baseline=0.7)

    assert_unbiased(compute_expected_gradient(logits, compute_advantages, compute_reinforce_losses), logits)


@pytest.mark.parametrize("group_size", [2, 3])
def test_maxrl_has_the_gradient_of_the_truncated_log_likelihood(group_size):
    """-sum over k < n of (1 - p)^k / k, where p is the probability of the two correct sequences."""
    logits, rewards = build_logits(), [float(index in (2, 7)) for index in range(len(SEQUENCES))]
    found = compute_expected_gradient(
        logits, compute_maxrl_advantages, compute_ppo_clip_losses, rewards=rewards, group_size=group_size
    )
    x = logits.clone().requires_grad_()
    probability = sum(compute_token_logprobs(x, SEQUENCES[index]).sum().exp() for index in (2, 7))
    sum(-((1 - probability) ** k) / k for k in range(1, group_size)).backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("k", [1, 2])
def test_pass_at_k_points_along_the_gradient_of_pass_at_k(k):
    """Without the division by the std, by enumeration; it scales each group, so it is undone group by group."""
    logits, rewards = build_logits(), [float(index in (2, 7)) for index in range(len(SEQUENCES))]

    def compute_unscaled(groups):
        (row,) = compute_pass_at_k_advantages(groups, k=k)
        n, num_failed = len(row), sum(run.reward == 0 for run in groups[0])
        mean = 1 - math.comb(num_failed, k) / math.comb(n, k)
        return [[None if value is None else value * math.sqrt(mean * (1 - mean)) for value in row]]

    found = compute_expected_gradient(logits, compute_unscaled, compute_ppo_clip_losses, rewards=rewards, group_size=3)
    x = logits.clone().requires_grad_()
    probability = sum(compute_token_logprobs(x, SEQUENCES[index]).sum().exp() for index in (2, 7))
    (1 - (1 - probability) ** k).backward()
    assert found.norm() > 0
    torch.testing.assert_close(found, x.grad * found.norm() / x.grad.norm(), rtol=1e-7, atol=1e-9)
