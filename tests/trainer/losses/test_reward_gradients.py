"""From rewards to the gradient: whole updates in float64 against autograd of each formula in plain Python."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from test_algorithm_gradients import assert_equal_to, build_batch, gather_old, ppo_losses

from tunesmith.algorithms.advantages.group import RunOutcome
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.config import AlgorithmSection

REWARDS, GROUPS = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [0, 0, 0, 1, 1, 1]
PARTS = {"one": [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]], "two": [[0.3, 0.9, 0.1], [0.4, 0.2, 0.2]]}


def compute_maxrl(lengths: list[int]) -> list[float]:
    return [reward * 3 - 1 for row in REWARDS for reward in row]


def compute_opo(lengths: list[int]) -> list[float]:
    advantages = []
    for group, row in enumerate(REWARDS):
        own = lengths[3 * group : 3 * group + 3]
        baseline = sum(n * reward for n, reward in zip(own, row, strict=True)) / sum(own)
        advantages += [reward - baseline for reward in row]
    return advantages


def compute_pass_at_2(lengths: list[int]) -> list[float]:
    """Of three pairs the success is in two, so P = 2/3; a failure is in one of them and in the pair of failures."""
    std = math.sqrt(2 / 9)
    win, loss = (1 - 2 / 3) / std, -2 / 3 / std
    return [win if reward else (win + loss) / 2 for row in REWARDS for reward in row]


def compute_reinforce_baseline(lengths: list[int]) -> list[float]:
    centered = [reward - 1 / 3 for row in REWARDS for reward in row]
    return [value / (statistics.stdev(centered) + 1e-6) for value in centered]


def compute_gdpo(lengths: list[int]) -> list[float]:
    total = [0.0] * 6
    for name, weight in (("one", 1.0), ("two", 0.5)):
        for group, row in enumerate(PARTS[name]):
            std = statistics.stdev(row) + 1e-6
            for index, value in enumerate(row):
                total[3 * group + index] += weight * (value - statistics.fmean(row)) / std
    return [value / (statistics.stdev(total) + 1e-6) for value in total]


def sum_by_sequence(rows, old, advantages) -> torch.Tensor:
    return torch.stack([ppo_losses(*each).sum() for each in zip(rows, old, advantages, strict=True)]).mean()


def average_tokens(rows, old, advantages) -> torch.Tensor:
    return torch.cat([ppo_losses(*each) for each in zip(rows, old, advantages, strict=True)]).mean()


def reinforce(rows, old, advantages) -> torch.Tensor:
    """The value is that of the ratio, capped at 2; the gradient is that of the weighted logprob."""
    losses = []
    for row, before, advantage in zip(rows, old, advantages, strict=True):
        losses.append((-advantage * (row.detach() - before).exp().clamp(max=2) * row).sum())
    return torch.stack(losses).mean()


CASES = {
    "maxrl": (compute_maxrl, sum_by_sequence, {}),
    "opo": (compute_opo, reinforce, {}),
    "pass_at_k": (compute_pass_at_2, average_tokens, {"k": 2}),
    "reinforceplusplus_baseline": (compute_reinforce_baseline, average_tokens, {}),
    "gdpo": (compute_gdpo, average_tokens, {"rewards": {"one": 1.0, "two": 0.5}}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_the_rewards_equals_the_formula(name):
    compute, lose, args = CASES[name]
    section = AlgorithmSection(algorithm_type=name, advantage_args=args)
    blank = build_batch([0.0] * 6, GROUPS)
    old = gather_old(blank)
    outcomes = [
        [
            RunOutcome(
                reward=reward,
                num_turns=1,
                turn_logprobs=(tuple(old[3 * group + index].tolist()),),
                metrics={part: values[group][index] for part, values in PARTS.items()},
            )
            for index, reward in enumerate(row)
        ]
        for group, row in enumerate(REWARDS)
    ]
    found = [value for row in resolve_algorithm(section).compute_advantages(outcomes) for value in row]
    expected = compute([len(row) for row in old])
    samples = [
        replace(
            sample,
            advantages=tuple(found[sample.trajectory_index] if m else 0.0 for m in sample.is_sampled),
        )
        for sample in blank
    ]
    assert_equal_to(section, samples, lambda rows: lose(rows, old, expected))
