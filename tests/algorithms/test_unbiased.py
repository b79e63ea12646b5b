"""The policy gradient on average, by enumeration: three tokens, sequences of two, every group of two sequences."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from tunesmith.algorithms.advantages import RunOutcome, compute_multi_step_grpo_advantages
from tunesmith.algorithms.losses import TokenScores, compute_ppo_clip_losses

SEQUENCES = list(itertools.product(range(3), repeat=2))
REWARDS = [0.1 * first * second - 0.5 * (first == second) + 0.3 * second for first, second in SEQUENCES]
HUGE = 1e9
"""As epsilon it makes the advantage (R - mean) / HUGE, whatever the deviation."""


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


def test_group_relative_policy_gradient_is_unbiased_up_to_its_known_factor():
    """With its own reward in the group's mean, the expected gradient is (G - 1) / G times that of the mean reward."""
    torch.manual_seed(0)
    logits = torch.randn(4, 3, dtype=torch.float64)
    total = torch.zeros_like(logits)
    for pair in itertools.product(range(len(SEQUENCES)), repeat=2):
        outcomes = [RunOutcome(reward=REWARDS[index], num_steps=1) for index in pair]
        advantages = compute_multi_step_grpo_advantages([outcomes], epsilon=HUGE)[0]
        for index, advantage in zip(pair, advantages, strict=True):
            if advantage is None:
                continue
            x = logits.clone().requires_grad_()
            logprobs = compute_token_logprobs(x, SEQUENCES[index])
            old_logprobs = logprobs.detach()
            probability = torch.stack([compute_token_logprobs(logits, SEQUENCES[i]).sum() for i in pair]).sum().exp()
            scores = TokenScores(
                logprobs_N=logprobs,
                old_logprobs_N=old_logprobs,
                advantages_N=torch.full_like(old_logprobs, advantage * HUGE),
            )
            compute_ppo_clip_losses(scores).losses_N.sum().backward()
            total -= probability * x.grad / len(pair)
    torch.testing.assert_close(total, compute_exact_gradient(logits) / 2, rtol=1e-7, atol=1e-9)
