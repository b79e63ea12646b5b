"""The expected policy gradient of branching groups, by enumeration of a two-turn decision problem.

A rollout chooses a, reads a tool result and chooses b; both are 0 or 1. Where branches do not depend on what was
sampled, the gradient without a baseline is that of the expected reward. Otherwise the enumeration shows the bias that
docs/branching.md states.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest
import torch
from torch import Tensor

from tunesmith.config import BranchingSection
from tunesmith.experience.samples import share_credit
from tunesmith.rollout.branching.tree import Branching, GroupTrees
from tunesmith.types import Completion, Sampling, Task, Trajectory, Turn

REWARDS = {(0, 0): 0.3, (0, 1): 1.0, (1, 0): -0.5, (1, 1): 2.0}
LOGITS = torch.tensor([0.4, -0.3, 0.8], dtype=torch.float64)
"""Logit of a=1, of b=1 after a=0, and of b=1 after a=1."""
TASK = Task(task_id="t/0", index=0, row={})


def compute_logprob(logits: Tensor, a: int, b: int | None = None) -> Tensor:
    """Logprob of choosing a, or of choosing b after a."""
    logit, chosen = (logits[0], a) if b is None else (logits[1 + a], b)
    return torch.nn.functional.logsigmoid(logit if chosen else -logit)


def build_group(choices, *, group_size, section, is_certain) -> tuple[list[Trajectory], set[tuple[int, int]]]:
    """The group in which rollout r samples `choices[r][t]` in turn t, and which of the choices were sampled."""
    used, ended = set(), {}

    async def run(run_index, record):
        turns = []
        for number in range(2):
            prompt = (1,) if number == 0 else (*turns[0].prompt_ids, *turns[0].sampled_ids, 9)
            recorded = record.start((number, 0), prompt, Sampling(max_tokens=1))
            turn = None if recorded is None else recorded.turn
            if turn is None:
                chosen = choices[run_index][number]
                used.add((run_index, number))
                entropy = 0.0 if number == 0 or is_certain(turns[0].sampled_ids[0]) else 1.0
                turn = Turn(
                    prompt_ids=prompt, sampled_ids=(chosen,), logprobs=(0.0,), policy_versions=(0,),
                    distribution=Sampling(max_tokens=1).distribution, stop_reason="stop", entropies=(entropy,),
                )  # fmt: skip
                completion = Completion(
                    sampled_ids=(chosen,), logprobs=(0.0,), policy_versions=(0,), stop_reason="stop"
                )
                record.finish((number, 0), turn, completion)
            turns.append(turn)
            await asyncio.sleep(0)
        point = record.point
        ended[run_index] = Trajectory(
            task=TASK,
            run_index=run_index,
            turns=tuple(turns),
            reward=REWARDS[turns[0].sampled_ids[0], turns[1].sampled_ids[0]],
            parent=None if point is None else point.parent,
            branch_at=None if point is None else point.branch_at,
            turn_owners=() if point is None else point.turn_owners,
        )

    branching = Branching(section=section, vocab_size=2)
    trees = GroupTrees(branching, group_size=group_size, seed=0, run=run)
    asyncio.run(trees.run())
    return [ended[index] for index in range(group_size)], used


def compute_expected_gradient(
    section, *, group_size=2, has_baseline=False, has_hard_credit=False, is_certain=lambda a: False
) -> Tensor:
    """Expectation of the gradient of mean(advantage x logprob) over all choices; tokens of one group are summed."""
    total = torch.zeros_like(LOGITS)
    for flat in itertools.product((0, 1), repeat=2 * group_size):
        choices = list(zip(flat[::2], flat[1::2], strict=True))
        runs, used = build_group(choices, group_size=group_size, section=section, is_certain=is_certain)
        probability = torch.tensor(1.0, dtype=torch.float64)
        for (run_index, number), chosen in (
            ((index, turn), choices[index][turn]) for index in range(group_size) for turn in range(2)
        ):
            first = runs[run_index].turns[0].sampled_ids[0]
            if (run_index, number) not in used:
                probability = probability / 2
            else:
                logprob = compute_logprob(LOGITS, chosen) if number == 0 else compute_logprob(LOGITS, first, chosen)
                probability = probability * logprob.exp()
        mean = sum(run.reward for run in runs) / group_size if has_baseline else 0.0
        advantages = [run.reward - mean for run in runs]
        if has_hard_credit:
            runs, advantages = share_credit(runs, advantages)
        x = LOGITS.clone().requires_grad_()
        objective = torch.zeros((), dtype=torch.float64)
        for run, advantage in zip(runs, advantages, strict=True):
            (a,), (b,) = (turn.sampled_ids for turn in run.turns)
            values = advantage if isinstance(advantage, tuple) else (advantage,) * 2
            logprobs = (compute_logprob(x, a), compute_logprob(x, a, b))
            for turn, value, logprob in zip(run.turns, values, logprobs, strict=True):
                objective = objective + turn.is_trained * value * logprob / group_size
        objective.backward()
        total += probability * x.grad
    return total


def compute_gradient(weight=lambda a, b: 1.0) -> Tensor:
    """Sum over outcomes of probability x weight x reward x gradient of the logprob."""
    total = torch.zeros_like(LOGITS)
    for (a, b), reward in REWARDS.items():
        x = LOGITS.clone().requires_grad_()
        logprob = compute_logprob(x, a) + compute_logprob(x, a, b)
        logprob.backward()
        total += logprob.detach().exp() * weight(a, b) * reward * x.grad
    return total


ALWAYS = BranchingSection(initial_rollouts=1, beam=3, base_probability=1.0, entropy_weight=0.0)
NEVER = BranchingSection(initial_rollouts=1, beam=3, base_probability=0.0, entropy_weight=0.0)
BY_ENTROPY = BranchingSection(initial_rollouts=1, base_probability=0.0, entropy_weight=100.0, entropy_window=1)


def test_the_enumeration_reaches_the_exact_gradient():
    """The gradient of the expected reward by automatic differentiation."""
    x = LOGITS.clone().requires_grad_()
    sum(
        (compute_logprob(x, a) + compute_logprob(x, a, b)).exp() * reward for (a, b), reward in REWARDS.items()
    ).backward()
    torch.testing.assert_close(compute_gradient(), x.grad)
    torch.testing.assert_close(compute_expected_gradient(NEVER), x.grad)


@pytest.mark.parametrize("group_size", [2, 3])
def test_branches_that_do_not_depend_on_the_samples_are_unbiased_without_a_baseline(group_size):
    torch.testing.assert_close(compute_expected_gradient(ALWAYS, group_size=group_size), compute_gradient())


@pytest.mark.parametrize("group_size", [2, 3])
def test_a_group_mean_cancels_the_gradient_of_a_turn_that_all_rollouts_share(group_size):
    """A turn that d of n rollouts share keeps 1 - d/n of its gradient, one of a single rollout 1 - 1/n."""
    found = compute_expected_gradient(ALWAYS, group_size=group_size, has_baseline=True)
    exact = compute_gradient()
    torch.testing.assert_close(found[0], torch.zeros_like(found[0]))
    torch.testing.assert_close(found[1:], (1 - 1 / group_size) * exact[1:])


def test_without_branches_a_group_mean_scales_the_whole_gradient():
    torch.testing.assert_close(compute_expected_gradient(NEVER, has_baseline=True), compute_gradient() / 2)


def test_hard_credit_trains_a_shared_turn_once():
    """Its weight is 1 of 2 rollouts, that of a turn of one rollout is unchanged."""
    found, exact = compute_expected_gradient(ALWAYS, has_hard_credit=True), compute_gradient()
    torch.testing.assert_close(found, torch.stack([exact[0] / 2, exact[1], exact[2]]))


def test_branches_by_entropy_weight_what_follows_by_the_number_of_rollouts_through_it():
    """After a=1 the model is unsure, so the second rollout repeats a=1; after a=0 it starts from the task."""
    found = compute_expected_gradient(BY_ENTROPY, is_certain=lambda a: a == 0)
    p = torch.sigmoid(LOGITS[0]).item()
    expected = compute_gradient(lambda a, b: (1 + (1 - p) + (1 if a == 1 else 0)) / 2)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, compute_gradient(), rtol=0.05)
