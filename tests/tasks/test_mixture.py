"""Several data sets: mixed by size as published or by weight to within about one task, each with its own selector."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tunesmith.errors import ConfigError
from tunesmith.tasks.bots import BotsSelector
from tunesmith.tasks.selector import Mixture, build_sequential

SIZES = {"a": 5, "b": 7}


def build(**options):
    return Mixture({n: build_sequential(np.zeros((k, 0)), seed=0) for n, k in SIZES.items()}, SIZES, **options)


def sets_of(indices):
    return [int(index >= 5) for index in indices]


def test_without_weights_sets_are_drawn_from_a_list_shuffled_by_size():
    mixture = build(seed=0)
    first, second = mixture.select(12), mixture.select(12)
    assert sets_of(first) == [1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 1, 0]
    assert sets_of(second) == [1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0]
    assert sorted(first) == sorted(second) == list(range(12))


def test_weights_hold_after_any_number_of_draws():
    mixture = build(seed=0, weights={"a": 3.0, "b": 1.0})
    turns = [turn for _ in range(5) for turn in sets_of(mixture.select(7))]
    for length in range(1, len(turns) + 1):
        assert abs(sum(turns[:length]) - length / 4) <= 1


class Fixed:
    """A custom selector that always returns the same indices and has no metrics."""

    def __init__(self, given):
        self.given = given

    def select(self, batch_size):
        return self.given

    def feedback(self, indices, pass_rates):
        return None


@pytest.mark.parametrize("given", [[5], [-1], [], [0, 1], [0.0], None])
def test_a_selector_that_returns_invalid_indices_is_refused(given):
    mixture = Mixture({"a": Fixed(given), "b": Fixed([0])}, SIZES, weights={"a": 3.0, "b": 1.0}, seed=0)
    with pytest.raises(ConfigError, match="must return 1 indices from 0 to 4, got"):
        mixture.select(1)


def test_indices_may_be_an_array_and_feedback_may_return_none():
    mixture = Mixture({"a": Fixed(np.asarray([4])), "b": Fixed([0])}, SIZES, weights={"a": 3.0, "b": 1.0}, seed=0)
    assert mixture.select(1) == [4]
    assert mixture.feedback([4], [1.0]) == {}


def test_feedback_reaches_the_selector_of_the_tasks_set():
    selectors = {n: BotsSelector(np.zeros((k, 0)), seed=0, m=8, rho=0.0) for n, k in SIZES.items()}
    mixture = Mixture(selectors, SIZES, seed=0)
    metrics = mixture.feedback([1, 6], [1.0, 0.0])
    assert selectors["a"].alpha[1] > 2 and selectors["b"].beta[1] > 2
    assert metrics["selector/num_feedback/a"] == metrics["selector/num_feedback/b"] == 1
    drawn = mixture.select(4)
    assert sorted(choice.index for choice in mixture.explain().choices) == sorted(drawn)


def test_a_restored_state_continues_the_same_selections():
    for options in ({"seed": 2}, {"seed": 2, "weights": {"a": 1.0, "b": 2.0}}):
        first, second = build(**options), build(**options)
        first.select(17)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.select(20) == first.select(20)
