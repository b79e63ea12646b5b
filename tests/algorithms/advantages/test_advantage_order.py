"""Advantages do not depend on the order of groups and of rollouts within a group."""

from __future__ import annotations

import random

import pytest

from tunesmith.algorithms.advantages.group import RunOutcome
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.config import AlgorithmSection

ARGS = {"gdpo": {"rewards": {"one": 1.0, "two": 0.5}}, "pass_at_k": {"k": 2}}
WITH_ADVANTAGES = sorted(name for name, entry in ALGORITHMS.items() if entry.compute_advantages is not None)


def build_groups(seed: int) -> list[list[RunOutcome]]:
    """Groups with equal rewards, unscored rollouts and a single rollout among them."""
    rng = random.Random(seed)

    def build(reward: float | None) -> RunOutcome:
        turns = tuple(tuple(-rng.random() for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 3)))
        return RunOutcome(
            reward=reward,
            num_turns=len(turns),
            turn_prompts=tuple((rng.randrange(3),) for _ in turns),
            turn_logprobs=turns,
            metrics={"one": rng.random(), "two": float(rng.randrange(2))},
            baseline_reward=0.5,
        )

    rewards = [[1.0, 0.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5], [1.0, None, 0.0, 0.0], [1.0], [None, None], [0.0, 0.0, 1.0]]
    return [[build(reward) for reward in row] for row in rewards]


@pytest.mark.parametrize("name", WITH_ADVANTAGES)
def test_advantages_do_not_depend_on_order(name):
    section = AlgorithmSection(algorithm_type=name, advantage_args=ARGS.get(name, {}))
    compute = resolve_algorithm(section).compute_advantages
    groups = build_groups(3)
    expected = compute(groups)
    assert any(value for row in expected for value in row if value is not None)
    rng = random.Random(7)
    order = rng.sample(range(len(groups)), len(groups))
    members = [rng.sample(range(len(group)), len(group)) for group in groups]
    found = compute([[groups[i][j] for j in members[i]] for i in order])
    for row, i in zip(found, order, strict=True):
        for value, j in zip(row, members[i], strict=True):
            assert (value is None) == (expected[i][j] is None)
            if value is not None:
                assert value == pytest.approx(expected[i][j], rel=1e-12)
