"""BOTS: the published update, the selector's state, and cases that the published code does not handle."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.tasks.bots import BotsSelector, ReferencePassRates, average_repeated, find_largest

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
def test_a_restored_selector_makes_the_same_selections(args):
    first = BotsSelector(FEATURES, seed=1, **args)
    run_rounds(first, 5)
    second = BotsSelector(FEATURES, seed=1, **args)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run_rounds(second, 6) == run_rounds(first, 6)
    assert (second.alpha == first.alpha).all() and (second.beta == first.beta).all()
    assert (second.rho, second.capability) == (first.rho, first.capability)


def test_the_state_of_another_data_set_is_refused():
    with pytest.raises(ValueError, match="has 10 tasks, the data set has 3"):
        BotsSelector(np.zeros((3, 0)), seed=0).load_state_dict(BotsSelector(NO_FEATURES, seed=0).state_dict())


@given(
    num_columns=st.integers(0, 4),
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), max_size=6), max_size=8),
    do_sample=st.booleans(),
)
def test_posteriors_stay_positive_and_bounded_for_any_rewards(num_columns, rounds, do_sample):
    features = np.random.default_rng(0).random((10, num_columns))
    selector = BotsSelector(features, seed=0, m=8, lamb=0.1, do_sample=do_sample)
    for feedback in rounds:
        selector.feedback([index for index, _ in feedback], [rate for _, rate in feedback])
        chosen = selector.select(4)
        assert len(set(chosen)) == 4 or selector.num_drawn % 10
        assert selector.alpha.min() > 0 and selector.beta.min() > 0
        assert (selector.alpha + selector.beta).max() <= 6 + 8 / 0.1 + 1e-9


def test_a_repeated_task_counts_once_with_its_mean():
    indices, rates = average_repeated([3, 1, 3], [0.0, 2.0, 1.0])
    assert indices.tolist() == [1, 3] and rates.tolist() == [1.0, 0.5]


def test_a_nan_pass_rate_is_refused():
    with pytest.raises(ValueError, match="not a number"):
        BotsSelector(NO_FEATURES, seed=0).feedback([0], [float("nan")])


def test_features_set_the_prior_and_the_first_choice():
    selector = BotsSelector(FEATURES, seed=0, prior_count=4, target_reward=0.8, tau=0)
    assert selector.alpha[7] == pytest.approx(1 + 4 * 0.8)
    assert selector.beta[7] == pytest.approx(1 + 4 * 0.2)
    sure = BotsSelector(FEATURES, seed=0, prior_count=1e6, target_reward=0.8, tau=0)
    assert sure.select(2) == [7, 1]


def test_without_features_untried_tasks_follow_the_mean_feedback():
    selector = BotsSelector(NO_FEATURES, seed=0, m=10, lamb=0.0, rho=0.5)
    selector.feedback([0, 1], [0.0, 0.5])
    assert selector.capability == pytest.approx(0.25, abs=1e-5)
    expected = (1 + 5 * 0.25) / (2 + 5)
    assert (selector.alpha / (selector.alpha + selector.beta))[2:] == pytest.approx([expected] * 8, abs=1e-5)


def test_one_column_is_a_knot_between_pass_rates_zero_and_one():
    references = ReferencePassRates(np.array([[0.2], [0.6]]))
    everything = np.arange(2)
    assert references.estimate_capability(everything, 0.4) == pytest.approx(1.0, abs=1e-5)
    assert references.predict(1.0).tolist() == [0.2, 0.6]
    assert references.predict(1.5).tolist() == pytest.approx([0.6, 0.8])
    assert references.predict(0.5).tolist() == pytest.approx([0.1, 0.3])


def test_two_columns_give_a_line_in_either_order():
    weak_first, strong_first = ReferencePassRates(FEATURES), ReferencePassRates(FEATURES[:, ::-1])
    for references in (weak_first, strong_first):
        assert references.predict(0.25) == pytest.approx(np.clip(0.75 * np.array(WEAK) + 0.25 * np.array(STRONG), 0, 1))
        index = np.array([0, 2, 8])
        expected = (0.5 - np.mean([0.1, 0.5, 0.2])) / (np.mean([0.2, 0.6, 0.4]) - np.mean([0.1, 0.5, 0.2]) + 1e-6)
        assert references.estimate_capability(index, 0.5) == pytest.approx(expected)


def test_capability_outside_the_references_is_extrapolated_as_published():
    references = ReferencePassRates(np.array([[0.4, 0.5], [0.4, 0.5]]))
    everything = np.arange(2)
    assert references.estimate_capability(everything, 0.9) == pytest.approx(5.0, abs=1e-3)
    assert references.estimate_capability(everything, 0.0) == pytest.approx(-4.0, abs=1e-3)
    assert references.predict(5.0).tolist() == pytest.approx([0.9, 0.9])
    assert references.predict(-6.0).tolist() == [0.0, 0.0]
    selector = BotsSelector(
        np.array([[0.4, 0.5], [0.4, 0.5], [0.2, 0.25]]), seed=0, m=10, rho=0.5, lamb=0, prior_count=0
    )
    selector.feedback([0, 1], [0.9, 0.9])
    assert selector.capability == pytest.approx(5.0, abs=1e-3)
    assert [selector.alpha[2], selector.beta[2]] == pytest.approx([1 + 5 * 0.45, 1 + 5 * 0.55], abs=1e-3)


def test_references_in_the_wrong_order_on_the_given_tasks_give_no_estimate():
    weak_is_better = ReferencePassRates(np.array([[0.6, 0.4], [0.0, 1.0], [0.0, 1.0]]))
    assert weak_is_better.estimate_capability(np.array([0]), 0.5) is None
    nearly_alike = ReferencePassRates(np.array([[0.5, 0.5005]]))
    assert nearly_alike.estimate_capability(np.array([0]), 0.9) is None


def test_old_evidence_decays_to_the_feature_prior():
    features = np.array([[0.2], [0.9]])
    selector = BotsSelector(features, seed=0, m=8, lamb=0.25, rho=0.0, prior_count=4)
    prior = [(1.8, 4.2), (4.6, 1.4)]
    assert list(zip(selector.alpha, selector.beta, strict=True)) == [pytest.approx(each) for each in prior]
    selector.feedback([0], [1.0])
    assert [selector.alpha[0], selector.beta[0]] == pytest.approx([1.8 + 8, 4.2])
    for _ in range(2):
        selector.feedback([1], [0.5])
    assert [selector.alpha[0], selector.beta[0]] == pytest.approx([1.8 + 8 * 0.75**2, 4.2])
    for _ in range(200):
        selector.feedback([1], [0.5])
    assert [selector.alpha[0], selector.beta[0]] == pytest.approx(prior[0])
    assert [selector.alpha[1], selector.beta[1]] == pytest.approx([4.6 + 4 / 0.25, 1.4 + 4 / 0.25])


def test_three_columns_are_piecewise_linear():
    references = ReferencePassRates(np.array([[0.1, 0.3, 0.9], [0.1, 0.5, 0.9]]))
    assert references.predict(1.0).tolist() == [0.3, 0.5]
    assert references.predict(1.5).tolist() == pytest.approx([0.6, 0.7])
    assert references.estimate_capability(np.arange(2), 0.65) == pytest.approx(1.5, abs=1e-4)


def test_equal_references_give_no_capability_estimate():
    same = np.full((4, 2), 0.5)
    selector = BotsSelector(same, seed=0, m=10, lamb=0.0, prior_count=0)
    selector.feedback([0], [1.0])
    assert selector.capability is None
    assert selector.alpha.tolist() == [11.0, 1.0, 1.0, 1.0]


def test_adaptive_rho_is_halved_permanently_by_a_large_error():
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


def test_a_batch_repeats_tasks_only_when_larger_than_the_data_set():
    selector = BotsSelector(FEATURES, seed=0, tau=0)
    assert sorted(selector.select(10)) == list(range(10))
    drawn = selector.select(23)
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list(range(10))


def test_greedy_selections_before_feedback_choose_other_tasks():
    selector = BotsSelector(FEATURES, seed=0, target_reward=0.8, tau=0)
    first, second = selector.select(4), selector.select(4)
    restored = BotsSelector(FEATURES, seed=0, target_reward=0.8, tau=0)
    restored.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    third = selector.select(4)
    assert len({*first, *second}) == 8
    assert len({*third}) == 4 and restored.select(4) == third
    selector.feedback([], [])
    assert selector.select(4) == first


def test_sampled_selections_before_feedback_differ():
    selector = BotsSelector(NO_FEATURES, seed=0, tau=0, do_sample=True)
    assert len({tuple(selector.select(3)) for _ in range(4)}) > 1


def test_thompson_sampling_scores_draws_from_the_posterior():
    rates = []
    for seed in range(400):
        selector = BotsSelector(np.array([[0.75]]), seed=seed, tau=0, do_sample=True, prior_count=2)
        selector.select(1)
        rates.append(selector.explain().choices[0].numbers["scored_pass_rate"])
    mean, variance = 2.5 / 4, 2.5 * 1.5 / (4**2 * 5)
    assert np.mean(rates) == pytest.approx(mean, abs=4 * np.sqrt(variance / 400))
    assert np.var(rates) == pytest.approx(variance, rel=0.25)


@pytest.mark.parametrize(("do_sample", "is_partial"), [(True, True), (False, False)])
def test_only_thompson_sampling_scores_a_subset_of_tasks(do_sample, is_partial):
    """The best task is missed in most selections if one in ten tasks is scored."""
    features = np.full((1000, 1), 0.1)
    features[123] = 0.9
    args = {"target_reward": 0.9, "tau": 0, "prior_count": 1e9, "do_sample": do_sample, "max_candidates": 100}
    firsts = [BotsSelector(features, seed=seed, **args).select(1)[0] for seed in range(100)]
    assert (firsts.count(123) < 30) == is_partial
    assert firsts.count(123) >= (2 if is_partial else 100)


def test_the_scored_subset_has_at_least_four_batches():
    features = np.linspace(0, 1, 400)[:, None]
    args = {"target_reward": 1.0, "tau": 0, "prior_count": 1e9, "do_sample": True, "max_candidates": 1}
    lowest = [min(BotsSelector(features, seed=seed, **args).select(10)) for seed in range(20)]
    assert np.mean(lowest) > 250, "the best ten of forty are above the median of all"


def test_subsets_cover_every_task_once_per_epoch():
    selector = BotsSelector(np.zeros((1000, 0)), seed=0, tau=0, do_sample=True, max_candidates=50, max_repeats=1)
    drawn = [index for _ in range(10) for index in selector.select(100)]
    assert sorted(drawn) == list(range(1000))


def test_tau_samples_from_the_softmax_of_two_scores():
    features = np.array([[0.8], [0.6]])
    first = [
        BotsSelector(features, seed=seed, target_reward=0.8, tau=0.2, prior_count=1e9).select(1)[0]
        for seed in range(2000)
    ]
    expected = 1 / (1 + np.exp(-0.2 / 0.2))
    assert np.mean(np.array(first) == 0) == pytest.approx(expected, abs=0.03)


def test_tau_samples_from_the_softmax_of_three_scores():
    features = np.array([[0.8], [0.4], [0.4]])
    args = {"target_reward": 0.8, "tau": 0.2, "prior_count": 1e9}
    first = [BotsSelector(features, seed=seed, **args).select(1)[0] for seed in range(2000)]
    weights = np.exp([0.0, -2.0, -2.0])
    assert np.bincount(first, minlength=3) / 2000 == pytest.approx(weights / weights.sum(), abs=0.03)


def test_ties_at_the_threshold_are_broken_at_random_and_the_rest_is_sorted():
    values = np.array([0.5, 2.0, 0.5, 1.0, 0.5])
    drawn = [find_largest(values, 3, np.random.default_rng(seed)).tolist() for seed in range(20)]
    assert all(pick[:2] == [1, 3] for pick in drawn)
    assert {pick[2] for pick in drawn} == {0, 2, 4}
    assert all(len(set(find_largest(np.zeros(5), 5, np.random.default_rng(seed)).tolist())) == 5 for seed in range(20))


def test_explain_returns_choices_with_reasons():
    selector = BotsSelector(FEATURES, seed=0, target_reward=0.8, tau=0)
    chosen = selector.select(2)
    selection = selector.explain()
    assert [choice.index for choice in selection.choices] == chosen
    assert "near the target 0.8" in selection.choices[0].reason
    alpha, beta = selector.alpha[chosen[0]], selector.beta[chosen[0]]
    assert selection.choices[0].numbers == {
        "alpha": alpha,
        "beta": beta,
        "expected_pass_rate": alpha / (alpha + beta),
        "scored_pass_rate": alpha / (alpha + beta),
        "num_selected": 1,
    }
    assert selection.summary["selector/num_tasks_tried"] == 2
    selector.feedback([], [])
    assert selector.select(2) == chosen
    assert selector.explain().choices[0].numbers["num_selected"] == 2


def test_explain_of_a_batch_across_epochs_has_all_choices():
    selector = BotsSelector(FEATURES, seed=0, tau=0)
    chosen = selector.select(13)
    assert [choice.index for choice in selector.explain().choices] == chosen


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"tau": 0}, "expected pass rate 0.500, near the target 1"),
        ({"tau": 0.5}, "expected pass rate 0.500, sampled with tau 0.5 near the target 1"),
        ({"tau": 0, "do_sample": True}, "pass rate drawn from the posterior 0."),
    ],
)
def test_a_reason_names_the_quantity_compared_with_the_target(args, reason):
    selector = BotsSelector(NO_FEATURES, seed=0, **args)
    selector.select(1)
    assert selector.explain().choices[0].reason.startswith(reason)


def test_the_histogram_counts_tasks_by_expected_pass_rate():
    features = np.array([[0.0], [0.05], [0.31], [0.35], [0.55], [0.999], [1.0]])
    selector = BotsSelector(features, seed=0, prior_count=1e9)
    assert selector.explain().choices == ()
    assert selector.explain().histogram == (2, 0, 0, 2, 0, 1, 0, 0, 0, 2)
    low = BotsSelector(np.array([[0.1], [0.2]]), seed=0, prior_count=1e9)
    low.alpha[:], low.beta[:] = [1.0, 1.0], [8.0, 3.0]
    assert low.explain().histogram == (0, 1, 1, 0, 0, 0, 0, 0, 0, 0)


def test_feedback_returns_metrics_of_feedback_and_posteriors():
    selector = BotsSelector(np.array([[0.2], [0.6]]), seed=0, m=8, lamb=0.0, rho=0.25, prior_count=0)
    selector.select(1)
    assert "selector/capability" not in selector.feedback([], [])
    metrics = selector.feedback([0, 1], [0.1, 0.7])
    assert metrics == pytest.approx(
        {
            "selector/feedback_mean": 0.4,
            "selector/num_feedback": 2,
            "selector/prediction_error": 0.1,
            "selector/expected_pass_rate": ((1 + 8 * 0.1) / 10 + (1 + 8 * 0.7) / 10) / 2,
            "selector/mean_count": 10,
            "selector/num_tasks_tried": 1,
            "selector/rho": 0.25,
            "selector/capability": 1,
        },
        abs=1e-5,
    )


def test_defaults_are_those_of_the_docstring():
    """m 16, lamb 0.2, rho 0.2, prior_count 4, and tau 1."""
    selector = BotsSelector(np.array([[0.5], [0.5]]), seed=0)
    assert selector.alpha.tolist() == [3.0, 3.0]
    selector.feedback([0], [0.5])
    assert [selector.alpha[0], selector.alpha[1]] == pytest.approx([3 + 8, 3 + 0.2 * 8], abs=1e-4)
    assert selector.rho == 0.2
    selector.select(1)
    assert selector.explain().choices[0].reason.endswith("sampled with tau 1 near the target 1")


def test_tasks_of_every_selection_since_the_last_feedback_come_last():
    selector = BotsSelector(FEATURES, seed=0, target_reward=0.8, tau=0)
    drawn = [index for _ in range(5) for index in selector.select(2)]
    assert sorted(drawn) == list(range(10))
