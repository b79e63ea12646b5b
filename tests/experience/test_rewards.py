"""Rewards of agents with tools: published values, the formulas written out, schedules, degenerate groups."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.experience.operators import (
    ToolOutcome,
    compute_arpo_reward,
    compute_efficiency_rewards,
    compute_factor,
    compute_sigma_scale,
)


def outcomes(correctness, calls, tokens, valid=None):
    valid = [True] * len(calls) if valid is None else valid
    return [
        ToolOutcome(correctness=c, num_calls=n, num_tokens=length, is_valid=v)
        for c, n, length, v in zip(correctness, calls, tokens, valid, strict=True)
    ]


def rewards_of(group, sigma_tool=0.1, sigma_length=0.1, **args):
    found = compute_efficiency_rewards(group, sigma_tool=sigma_tool, sigma_length=sigma_length, **args)
    return [reward for reward, *_ in found]


def test_the_reference_group_has_the_published_rewards():
    """Sigma 0.1 / 0.1, calls 1, 3, 2, tokens 100, 300, 200: the first rollout gets 1.0500 * 1.0612 = 1.1142."""
    group = outcomes([1, 1, 1], [1, 3, 2], [100, 300, 200])
    found = compute_efficiency_rewards(group, sigma_tool=0.1, sigma_length=0.1)
    reward, tool_factor, length_factor = found[0]
    assert tool_factor == pytest.approx(1.0500, abs=5e-5)
    assert length_factor == pytest.approx(1.0612, abs=5e-5)
    assert reward == pytest.approx(1.1142, abs=1e-4)
    assert found[2][0] == 1.0, "the average rollout keeps its correctness"


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 12), st.integers(0, 4000), st.booleans()), min_size=1, max_size=8
    ),
    st.floats(0, 2),
    st.floats(0, 2),
)
def test_rewards_equal_the_formula_written_out(rows, sigma_tool, sigma_length):
    correctness, calls, tokens, valid = zip(*rows, strict=True)
    mean_calls, mean_tokens = Fraction(sum(calls), len(rows)), Fraction(sum(tokens), len(rows))
    std = math.sqrt(sum((each - mean_tokens) ** 2 for each in tokens) / len(rows))
    expected = [
        c
        * (2 / (1 + math.exp(sigma_tool * float(n - mean_calls))))
        * (2 / (1 + math.exp(sigma_length * (float(length - mean_tokens) / std if std else 0.0))))
        + (0 if is_valid else -1)
        for c, n, length, is_valid in rows
    ]
    assert rewards_of(outcomes(correctness, calls, tokens, valid), sigma_tool, sigma_length) == pytest.approx(expected)


def test_a_group_of_one_and_equal_rollouts_keep_their_correctness():
    assert rewards_of(outcomes([0.7], [5], [999])) == [0.7]
    assert rewards_of(outcomes([1, 0.5], [2, 2], [100, 100]), 3.0, 3.0) == [1.0, 0.5]
    assert rewards_of([]) == []


def test_sigma_zero_is_correctness_alone():
    assert rewards_of(outcomes([1, 1, 0], [0, 9, 3], [1, 900, 50]), 0.0, 0.0) == [1.0, 1.0, 0.0]


def test_a_wrong_answer_gains_nothing_from_being_short():
    assert rewards_of(outcomes([0, 1], [0, 6], [1, 900]), 5.0, 5.0)[0] == 0.0


def test_a_wrong_format_costs_the_penalty_for_right_and_wrong_answers():
    group = outcomes([1, 0], [2, 2], [10, 10], [False, False])
    assert rewards_of(group) == [0.0, -1.0]
    assert rewards_of(group, format_penalty=0.25) == [0.75, -0.25]


def test_factors_of_large_excess_do_not_overflow():
    assert compute_factor(1e9, sigma=10.0) == 0.0
    assert compute_factor(-1e9, sigma=10.0) == 2.0


@pytest.mark.parametrize(
    ("step", "total_steps", "scale"),
    [(1, 5, 1.0), (2, 5, 0.75), (4, 5, 0.25), (5, 5, 0.0), (6, 5, 0.0), (1, 2, 1.0), (2, 2, 0.0), (1, 1, 1.0)],
)
def test_sigma_decays_linearly_from_the_first_step_to_the_last(step, total_steps, scale):
    assert compute_sigma_scale(step=step, total_steps=total_steps) == scale


@pytest.mark.parametrize(
    ("correctness", "is_valid", "has_used_all_tools", "reward"),
    [
        (1.0, True, True, 1.1),
        (1.0, True, False, 1.0),
        (0.4, True, True, 0.5),
        (0.0, True, True, 0.0),
        (0.0, True, False, 0.0),
        (1.0, False, True, -1.0),
        (0.0, False, False, -1.0),
    ],
)
def test_arpo_rewards(correctness, is_valid, has_used_all_tools, reward):
    computed = compute_arpo_reward(correctness=correctness, is_valid=is_valid, has_used_all_tools=has_used_all_tools)
    assert computed == pytest.approx(reward)
