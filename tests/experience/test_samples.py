"""Turns are merged into samples by exact token prefix; every sampled token is trained once with its recorded values."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.experience.samples import build_samples, chain_turns
from tunesmith.types import Distribution, DistributionSpan, Group, Sample, Task, Trajectory, Turn

TASK = Task(task_id="t/0", index=0, row={})


def build_turn(prompt: list[int], sampled: list[int], *, version: int = 0, temperature: float = 1.0) -> Turn:
    """A turn in which the i-th sampled token has logprob -i - 1."""
    return Turn(
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        logprobs=tuple(-i - 1.0 for i in range(len(sampled))),
        policy_versions=(version,) * len(sampled),
        distribution=Distribution(temperature=temperature),
        stop_reason="eos",
    )


def build_group(*trajectories: list[Turn]) -> Group:
    runs = [Trajectory(task=TASK, run_index=i, turns=tuple(turns), reward=1.0) for i, turns in enumerate(trajectories)]
    return Group(task=TASK, trajectories=tuple(runs))


def build(*turns: Turn) -> list[Sample]:
    return build_samples([build_group(list(turns))], [[0.5]])[0]


def trained(sample: Sample) -> list[int]:
    return [token for token, is_sampled in zip(sample.token_ids, sample.is_sampled, strict=True) if is_sampled]


def test_turns_that_extend_each_other_become_one_sample():
    first = build_turn([1, 2], [3, 4])
    second = build_turn([1, 2, 3, 4, 5], [6], version=1, temperature=0.5)
    (sample,) = build(first, second)
    assert sample.token_ids == (1, 2, 3, 4, 5, 6)
    assert sample.is_sampled == (False, False, True, True, False, True)
    assert sample.logprobs == (0.0, 0.0, -1.0, -2.0, 0.0, -1.0)
    assert sample.advantages == (0.0, 0.0, 0.5, 0.5, 0.0, 0.5)
    assert sample.policy_versions == (None, None, 0, 0, None, 1)
    assert sample.distribution_spans == (
        DistributionSpan(start=2, end=4, distribution=first.distribution),
        DistributionSpan(start=5, end=6, distribution=second.distribution),
    )


def test_prompt_with_an_edited_history_starts_a_new_sample():
    samples = build(build_turn([1, 2], [3, 4]), build_turn([1, 2, 3, 9], [6]))
    assert [sample.token_ids for sample in samples] == [(1, 2, 3, 4), (1, 2, 3, 9, 6)]
    assert [trained(sample) for sample in samples] == [[3, 4], [6]]


def test_second_extension_of_a_turn_uses_it_as_context():
    samples = build(build_turn([1], [2]), build_turn([1, 2, 3], [4]), build_turn([1, 2, 5], [6]))
    assert [sample.token_ids for sample in samples] == [(1, 2, 3, 4), (1, 2, 5, 6)]
    assert [trained(sample) for sample in samples] == [[2, 4], [6]]


def test_retries_and_parallel_choices_are_separate_samples():
    samples = build(build_turn([1], [2, 3]), build_turn([1], [2]), build_turn([1], [2, 3]))
    assert [trained(sample) for sample in samples] == [[2, 3], [2], [2, 3]]


def test_turn_joins_the_longest_chain_it_extends():
    cancelled, whole = build_turn([1], [2]), build_turn([1], [2, 3])
    assert chain_turns([cancelled, whole, build_turn([1, 2, 3], [4])]) == [[0], [1, 2]]


def test_turn_without_sampled_tokens_does_not_train():
    assert build(build_turn([1, 2], [])) == []
    (sample,) = build(build_turn([1], [2]), build_turn([1, 2, 3], []), build_turn([1, 2, 3], [4]))
    assert trained(sample) == [2, 4]


def test_trajectory_without_advantage_does_not_train_but_keeps_its_index():
    groups = [build_group([build_turn([1], [2])], [build_turn([1], [3])]), build_group([build_turn([5], [6])])]
    samples, metrics = build_samples(groups, [[None, -1.0], [2.0]])
    assert [(s.group_index, s.trajectory_index, s.advantages[-1]) for s in samples] == [(0, 1, -1.0), (1, 2, 2.0)]
    assert metrics == {
        "rollout/num_trained_trajectories": 2.0,
        "rollout/num_samples": 2.0,
        "rollout/num_branches": 0.0,
    }


def test_advantages_may_be_per_turn():
    """Each turn keeps its advantage when other turns have no sampled tokens, branch off, or are context only."""
    turns = [build_turn([1], [2]), build_turn([1, 2], []), build_turn([1, 2, 3], [4, 5]), build_turn([1, 2, 6], [7])]
    samples, _ = build_samples([build_group(turns)], [[(0.1, 0.2, 0.3, 0.4)]])
    assert [sample.advantages for sample in samples] == [(0.0, 0.1, 0.0, 0.3, 0.3), (0.0, 0.0, 0.0, 0.4)]
    with pytest.raises(ValueError, match="shorter"):
        build_samples([build_group(turns)], [[(0.1, 0.2)]])


def test_branches_are_counted():
    turns = [build_turn([1], [2]), build_turn([1, 2, 3], [4]), build_turn([1, 2, 5], [6]), build_turn([9], [9])]
    assert build_samples([build_group(turns)], [[1.0]])[1]["rollout/num_branches"] == 2.0


def test_advantages_must_match_the_trajectories():
    with pytest.raises(ValueError, match="shorter"):
        build_samples([build_group([], [])], [[1.0]])


@st.composite
def conversations(draw) -> list[Turn]:
    """Turns whose prompts extend, truncate or edit earlier context, as agents do."""
    tokens = st.lists(st.integers(0, 2), max_size=3)
    turns: list[Turn] = []
    for _ in range(draw(st.integers(0, 7))):
        past: tuple[int, ...] = ()
        if turns:
            turn = draw(st.sampled_from(turns))
            past = turn.prompt_ids + turn.sampled_ids
            past = past[: draw(st.integers(0, len(past)))] if draw(st.booleans()) else past
        turns.append(build_turn([7, *past[1:], *draw(tokens)], draw(tokens)))
    return turns


@given(conversations())
def test_every_sampled_token_is_trained_exactly_once_in_its_own_context(turns):
    expected = Counter(
        (turn.prompt_ids + turn.sampled_ids[: i + 1], turn.logprobs[i])
        for turn in turns
        for i in range(len(turn.sampled_ids))
    )
    actual = Counter(
        (sample.token_ids[: time + 1], sample.logprobs[time])
        for sample in build(*turns)
        for time, is_sampled in enumerate(sample.is_sampled)
        if is_sampled
    )
    assert actual == expected


@given(conversations())
def test_chains_hold_each_turn_once_and_extend_token_for_token(turns):
    chains = chain_turns(turns)
    assert sorted(i for chain in chains for i in chain) == [i for i, turn in enumerate(turns) if turn.sampled_ids]
    for chain in chains:
        for earlier, later in pairwise(turns[i] for i in chain):
            past = earlier.prompt_ids + earlier.sampled_ids
            assert later.prompt_ids[: len(past)] == past


def test_a_prompt_equal_to_an_earlier_turn_extends_it_and_joins_the_longest_chain():
    first = build_turn([1], [2, 3, 4])
    longer = build_turn([1, 2, 3, 4], [9])
    assert chain_turns([first, longer]) == [[0, 1]]
    short, long = build_turn([1, 2, 3, 4], [5]), build_turn([1, 2], [3, 4, 5, 6])
    last = build_turn([1, 2, 3, 4, 5, 6], [7])
    assert chain_turns([short, long, last]) == [[0], [1, 2]]


def test_branches_are_summed_over_all_runs():
    branching = [build_turn([1], [2]), build_turn([3], [4])]
    metrics = build_samples([build_group(branching, branching), build_group([build_turn([1], [2])])], [[1, 1], [1]])[1]
    assert metrics == {
        "rollout/num_trained_trajectories": 3,
        "rollout/num_samples": 5,
        "rollout/num_branches": 2,
    }
