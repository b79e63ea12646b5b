"""BOTS: the published update, its state, and what it does where the published code stops."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.tasks.bots import BotsSelector, average_repeated, find_largest
from tunesmith.tasks.references import References

WEAK = [0.1, 0.9, 0.5, 0.5, 0, 1, 0.3, 0.7, 0.2, 0.5]
STRONG = [0.2, 0.95, 0.6, 0.7, 0.1, 1, 0.5, 0.9, 0.4, 0.5]
FEATURES = np.array([WEAK, STRONG]).T
PUBLISHED = {"m": 8, "lamb": 0.1, "rho": 0.1, "target_reward": 0.8, "tau": 0, "prior_count": 0}
NO_FEATURES = np.zeros((10, 0))


def pass_rates(indices):
    return [(index % 4) / 3 for index in indices]


def run_rounds(selector, num_rounds, size=4):
    picks = []
    for _ in range(num_rounds):
        picks.append(selector.select(size))
        selector.feedback(picks[-1], pass_rates(picks[-1]))
    return picks


def test_posteriors_capability_and_choices_are_the_published_ones():
    selector = BotsSelector(FEATURES, seed=42, **PUBLISHED)
    selector.feedback([8, 6, 7, 5], pass_rates([8, 6, 7, 5]))
    assert run_rounds(selector, 2) == [[7, 6, 1, 9], [7, 6, 2, 3]]
    assert selector.alpha == pytest.approx(
        [1.16511, 4.68869, 6.97307, 9.59547, 1.0, 4.68, 15.45333, 22.68, 1.24381, 4.124], abs=1e-5
    )
    assert selector.beta == pytest.approx(
        [3.00289, 5.95931, 4.39493, 1.77253, 3.168, 5.32, 8.22667, 1.0, 8.75619, 6.524], abs=1e-5
    )
    assert selector.capability == pytest.approx(-0.0928563, abs=1e-7)


@pytest.mark.parametrize(
    "args",
    [
        PUBLISHED,
        PUBLISHED | {"do_sample": True},
        {"tau": 0.5, "adaptive_rho": True},
        {"max_repeats": 1, "tau": 0},
        {"do_sample": True, "max_candidates": 5},
    ],
)
def test_a_restored_selector_goes_on_exactly(args):
    first = BotsSelector(FEATURES, seed=1, **args)
    run_rounds(first, 5)
    second = BotsSelector(FEATURES, seed=1, **args)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run_rounds(second, 6) == run_rounds(first, 6)
    assert (second.alpha == first.alpha).all() and (second.beta == first.beta).all()
    assert (second.rho, second.capability) == (first.rho, first.capability)


def test_the_state_of_another_data_set_is_refused():
    with pytest.raises(ValueError, match="of 10 tasks, the data set has 3"):
        BotsSelector(np.zeros((3, 0)), seed=0).load_state_dict(BotsSelector(NO_FEATURES, seed=0).state_dict())


@given(
    num_columns=st.integers(0, 4),
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), max_size=6), max_size=8),
    do_sample=st.booleans(),
)
def test_posteriors_stay_positive_and_bounded_whatever_the_rewards(num_columns, rounds, do_sample):
    features = np.random.default_rng(0).random((10, num_columns))
    selector = BotsSelector(features, seed=0, m=8, lamb=0.1, do_sample=do_sample)
    for feedback in rounds:
        selector.feedback([index for index, _ in feedback], [rate for _, rate in feedback])
        chosen = selector.select(4)
        assert len(set(chosen)) == 4 or selector.num_drawn % 10
        assert selector.alpha.min() > 0 and selector.beta.min() > 0
        assert (selector.alpha + selector.beta).max() <= 6 + 8 / 0.1 + 1e-9


def test_a_task_that_was_tried_twice_counts_once_with_its_mean():
    indices, rates = average_repeated([3, 1, 3], [0.0, 2.0, 1.0])
    assert indices.tolist() == [1, 3] and rates.tolist() == [1.0, 0.5]


def test_a_pass_rate_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="not a number"):
        BotsSelector(NO_FEATURES, seed=0).feedback([0], [float("nan")])


def test_features_make_the_prior_and_so_the_first_choice():
    selector = BotsSelector(FEATURES, seed=0, prior_count=4, target_reward=0.8, tau=0)
    assert selector.alpha[7] == pytest.approx(1 + 4 * 0.8)
    assert selector.beta[7] == pytest.approx(1 + 4 * 0.2)
    sure = BotsSelector(FEATURES, seed=0, prior_count=1e6, target_reward=0.8, tau=0)
    assert sure.select(2) == [7, 1]


def test_without_features_the_others_follow_the_mean_of_what_was_seen():
    selector = BotsSelector(NO_FEATURES, seed=0, m=10, lamb=0.0, rho=0.5)
    selector.feedback([0, 1], [0.0, 0.5])
    assert selector.capability == pytest.approx(0.25, abs=1e-5)
    expected = (1 + 5 * 0.25) / (2 + 5)
    assert (selector.alpha / (selector.alpha + selector.beta))[2:] == pytest.approx([expected] * 8, abs=1e-5)


def test_one_column_lies_between_solving_nothing_and_everything():
    references = References(np.array([[0.2], [0.6]]))
    everything = np.arange(2)
    assert references.locate(everything, 0.4) == pytest.approx(1.0, abs=1e-5)
    assert references.predict(1.0).tolist() == [0.2, 0.6]
    assert references.predict(1.5).tolist() == pytest.approx([0.6, 0.8])
    assert references.predict(0.5).tolist() == pytest.approx([0.1, 0.3])


def test_two_columns_make_a_line_and_their_order_does_not_matter():
    weak_first, strong_first = References(FEATURES), References(FEATURES[:, ::-1])
    for references in (weak_first, strong_first):
        assert references.predict(0.25) == pytest.approx(np.clip(0.75 * np.array(WEAK) + 0.25 * np.array(STRONG), 0, 1))
        index = np.array([0, 2, 8])
        expected = (0.5 - np.mean([0.1, 0.5, 0.2])) / (np.mean([0.2, 0.6, 0.4]) - np.mean([0.1, 0.5, 0.2]) + 1e-6)
        assert references.locate(index, 0.5) == pytest.approx(expected) or expected > 2


def test_three_columns_bend_at_the_middle_one():
    references = References(np.array([[0.1, 0.3, 0.9], [0.1, 0.5, 0.9]]))
    assert references.predict(1.0).tolist() == [0.3, 0.5]
    assert references.predict(1.5).tolist() == pytest.approx([0.6, 0.7])
    assert references.locate(np.arange(2), 0.65) == pytest.approx(1.5, abs=1e-4)


def test_references_that_do_alike_say_nothing_of_the_capability():
    same = np.full((4, 2), 0.5)
    selector = BotsSelector(same, seed=0, m=10, lamb=0.0, prior_count=0)
    selector.feedback([0], [1.0])
    assert selector.capability is None
    assert selector.alpha.tolist() == [11.0, 1.0, 1.0, 1.0]


def test_adaptive_rho_is_halved_for_good_by_a_surprise():
    selector = BotsSelector(FEATURES, seed=0, rho=0.2, adaptive_rho=True)
    selector.feedback([0, 1, 4, 5], [1.0, 0.0, 1.0, 0.0])
    assert selector.rho == 0.1
    steady = BotsSelector(FEATURES, seed=0, rho=0.2, adaptive_rho=True)
    steady.feedback([0, 6, 7], [0.1, 0.3, 0.7])
    assert steady.rho == 0.2


@pytest.mark.parametrize("max_repeats", [1, 2])
def test_repeats_within_an_epoch_are_bounded(max_repeats):
    selector = BotsSelector(FEATURES, seed=0, target_reward=0.8, tau=0, max_repeats=max_repeats)
    drawn = [index for batch in run_rounds(selector, 10, size=3) for index in batch]
    for start in (0, 10, 20):
        assert np.bincount(drawn[start : start + 10], minlength=10).max() <= max_repeats


def test_a_batch_holds_a_task_once_and_may_be_larger_than_the_data_set():
    selector = BotsSelector(FEATURES, seed=0, tau=0)
    assert sorted(selector.select(10)) == list(range(10))
    drawn = selector.select(23)
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(10))


def test_until_feedback_comes_a_greedy_choice_goes_on_to_other_tasks():
    selector = BotsSelector(FEATURES, seed=0, target_reward=0.8, tau=0)
    first, second = selector.select(4), selector.select(4)
    restored = BotsSelector(FEATURES, seed=0, target_reward=0.8, tau=0)
    restored.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    third = selector.select(4)
    assert len({*first, *second}) == 8
    assert len({*third}) == 4 and restored.select(4) == third
    selector.feedback([], [])
    assert selector.select(4) == first


def test_without_feedback_sampling_goes_on_to_other_tasks():
    selector = BotsSelector(NO_FEATURES, seed=0, tau=0, do_sample=True)
    assert len({tuple(selector.select(3)) for _ in range(4)}) > 1


def test_many_tasks_are_looked_at_in_part_when_sampling():
    selector = BotsSelector(np.zeros((1000, 0)), seed=0, tau=0, do_sample=True, max_candidates=50, max_repeats=1)
    drawn = [index for _ in range(10) for index in selector.select(100)]
    assert sorted(drawn) == list(range(1000))


def test_the_temperature_draws_by_the_softmax_of_the_scores():
    features = np.array([[0.8], [0.6]])
    first = [
        BotsSelector(features, seed=seed, target_reward=0.8, tau=0.2, prior_count=1e9).select(1)[0]
        for seed in range(2000)
    ]
    expected = 1 / (1 + np.exp(-0.2 / 0.2))
    assert np.mean(np.array(first) == 0) == pytest.approx(expected, abs=0.03)


def test_ties_at_the_border_are_broken_by_chance_and_the_rest_is_in_order():
    values = np.array([0.5, 2.0, 0.5, 1.0, 0.5])
    drawn = [find_largest(values, 3, np.random.default_rng(seed)).tolist() for seed in range(20)]
    assert all(pick[:2] == [1, 3] for pick in drawn)
    assert {pick[2] for pick in drawn} == {0, 2, 4}


def test_the_report_says_what_was_chosen_and_why():
    selector = BotsSelector(FEATURES, seed=0, target_reward=0.8, tau=0)
    chosen = selector.select(2)
    selection = selector.explain()
    assert [choice.index for choice in selection.choices] == chosen
    assert "near the target 0.8" in selection.choices[0].reason
    assert selection.choices[0].numbers["num_selected"] == 1
    assert sum(selection.histogram) == 10
