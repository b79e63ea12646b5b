"""Hard and soft credit on trees of rollouts, by hand and against an independent sum over tokens, with the tries."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from tunesmith.experience.samples import build_samples, build_trie, share_credit
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn

TASK = Task(task_id="t/0", index=0, row={})


def build_turn(prompt, sampled) -> Turn:
    count = len(sampled)
    return Turn(
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        logprobs=(-0.5,) * count,
        policy_versions=(1,) * count,
        distribution=Distribution(),
        stop_reason="eos",
    )


def build_run(run_index, replies, *, parent=None, shared=0, prompt=(1, 2), failure=None) -> Trajectory:
    """A rollout whose turn i samples `replies[i]` and then reads the result (9, i); it shares turns with its parent."""
    turns = [] if parent is None else list(parent.turns[:shared])
    for index in range(len(turns), len(replies)):
        before = (*turns[-1].prompt_ids, *turns[-1].sampled_ids, 9, index) if turns else prompt
        turns.append(build_turn(before, replies[index]))
    return Trajectory(
        task=TASK,
        run_index=run_index,
        turns=tuple(turns),
        reward=None if failure else 1.0,
        failure=failure,
        parent=None if parent is None else parent.run_index,
        branch_at=None if parent is None else len(turns[shared].prompt_ids),
        turn_owners=() if parent is None else (parent.turn_owners + (parent.run_index,) * shared)[:shared],
    )


def build_tree() -> list[Trajectory]:
    """0: a b c; 1 branches from 0 after b; 2 branches from 1 after a; 3 starts from the task and samples a too."""
    root = build_run(0, [[11, 12], [13], [14]])
    one = build_run(1, [[], [], [15]], parent=root, shared=2)
    two = build_run(2, [[], [16], [17]], parent=one, shared=1)
    other = build_run(3, [[11, 12], [18]])
    return [root, one, two, other]


def test_hard_credit_by_hand():
    runs, advantages = share_credit(build_tree(), [1.0, 2.0, 6.0, -3.0])
    assert advantages == [(3.0, 1.5, 1.0), (3.0, 1.5, 2.0), (3.0, 6.0, 6.0), (-3.0, -3.0)]
    assert [[turn.is_trained for turn in run.turns] for run in runs] == [
        [True, True, True],
        [False, False, True],
        [False, True, True],
        [True, True],
    ]


def test_a_failed_parents_turns_are_trained_by_its_first_scored_branch():
    tree = build_tree()
    failed = build_run(0, [[11, 12], [13], [14]], failure=Failure(where="workflow", message="x"))
    runs, advantages = share_credit([failed, *tree[1:]], [None, 2.0, 6.0, -3.0])
    assert advantages == [None, (4.0, 2.0, 2.0), (4.0, 6.0, 6.0), (-3.0, -3.0)]
    assert [[turn.is_trained for turn in run.turns] for run in runs[1:3]] == [[True, True, True], [False, True, True]]


def test_one_advantage_per_turn_is_averaged_turn_by_turn():
    _, advantages = share_credit(build_tree()[:2], [(1.0, 2.0, 3.0), (5.0, 6.0, 7.0)])
    assert advantages == [(3.0, 4.0, 3.0), (3.0, 4.0, 7.0)]


def test_siblings_of_a_parent_that_an_operator_removed_share_its_turns():
    root = build_run(0, [[11, 12], [13], [14]])
    siblings = [build_run(index, [[], [], [20 + index]], parent=root, shared=2) for index in (1, 2)]
    runs, advantages = share_credit(siblings, [1.0, 3.0])
    assert advantages == [(2.0, 2.0, 1.0), (2.0, 2.0, 3.0)]
    assert [[turn.is_trained for turn in run.turns] for run in runs] == [[True] * 3, [False, False, True]]


def test_branches_of_a_removed_branch_share_the_turns_of_its_parent():
    root, one, two, _ = build_tree()
    three = build_run(4, [[], [], [19]], parent=one, shared=2)
    runs, advantages = share_credit([root, two, three], [1.0, 0.0, 0.5])
    # the first turn is that of all three, the second of `root` and `three`, which took it from `one`
    assert advantages == [(0.5, 0.75, 1.0), (0.5, 0.0, 0.0), (0.5, 0.75, 0.5)]
    assert [[turn.is_trained for turn in run.turns] for run in runs] == [
        [True, True, True],
        [False, True, True],
        [False, False, True],
    ]


def test_groups_without_branches_are_unchanged():
    runs = [build_run(0, [[11], [12]]), build_run(1, [[11], [12]])]
    assert share_credit(runs, [1.0, -1.0]) == (runs, [1.0, -1.0])


def build_random_tree(rng: random.Random) -> tuple[list[Trajectory], list[float]]:
    """Tokens are unique to the rollout that sampled them, so that a token is shared only along the tree."""
    runs: list[Trajectory] = []
    for run_index in range(8):
        replies = [[100 * run_index + 100 + 10 * turn + each for each in range(rng.randint(1, 3))] for turn in range(4)]
        parent = rng.choice([None, *runs])
        runs.append(build_run(run_index, replies, parent=parent, shared=0 if parent is None else rng.randint(1, 3)))
    return runs, [rng.gauss(0, 1) for _ in runs]


def sum_events(runs, advantages, *, has_hard_credit) -> dict[int, tuple[int, float]]:
    """Number of events and summed advantage of each sampled token id, from the trie of the samples."""
    group = Group(task=TASK, trajectories=tuple(runs))
    samples, _ = build_samples([group], [advantages], has_hard_credit=has_hard_credit)
    trie = build_trie(samples, range(len(samples)))
    assert len(set(trie.token_ids_T[trie.token_ids_T > 99].tolist())) == (trie.token_ids_T > 99).sum()
    found: dict[int, list[float]] = defaultdict(list)
    for target, sample, time in zip(trie.target_E.tolist(), trie.sample_E.tolist(), trie.time_E.tolist(), strict=True):
        found[target].append(samples[sample].advantages[time])
    return {token: (len(values), sum(values)) for token, values in found.items()}


@pytest.mark.parametrize("seed", range(20))
def test_soft_credit_sums_and_hard_credit_averages_over_the_rollouts_that_contain_a_token(seed):
    runs, advantages = build_random_tree(random.Random(seed))
    holders: dict[int, list[float]] = defaultdict(list)
    for run, advantage in zip(runs, advantages, strict=True):
        for token in {each for turn in run.turns for each in turn.sampled_ids}:
            holders[token].append(advantage)
    soft = sum_events(runs, advantages, has_hard_credit=False)
    hard = sum_events(runs, advantages, has_hard_credit=True)
    assert soft.keys() == hard.keys() == holders.keys()
    assert max(len(values) for values in holders.values()) > 1
    for token, values in holders.items():
        assert soft[token] == (len(values), pytest.approx(sum(values)))
        assert hard[token] == (1, pytest.approx(sum(values) / len(values)))
