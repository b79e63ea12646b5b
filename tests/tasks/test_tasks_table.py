"""Selectors and task operators by name: arguments are checked, custom selectors are built from the tasks."""

from __future__ import annotations

import pytest

from tunesmith.config import OperatorSection, SelectorSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.tasks.table import SELECTORS, apply_task_operators, build_selector, compute_weights
from tunesmith.types import Task

TASKS = [Task(task_id=f"t/{i}", index=i, row={"question": f"q{i}", "easy": i / 3}) for i in range(4)]


class Last:
    """A custom selector that always returns the last task."""

    def __init__(self, tasks, *, seed, offset: int = 0):
        self.index = len(tasks) - 1 - offset

    def select(self, batch_size):
        return [self.index] * batch_size

    def feedback(self, indices, pass_rates):
        return {}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def build_nothing(tasks):
    return object()


class Unsaved(Last):
    def state_dict(self):
        return {"indices": {self.index}}


OWN = {"mine:Last": Last, "mine:build_nothing": build_nothing, "mine:build_unsaved": Unsaved}


def build(**section):
    return build_selector(SelectorSection(**section), TASKS, seed=7, load=OWN.__getitem__)


def test_every_selector_builds():
    for name, entry in SELECTORS.items():
        assert len(build(selector_type=name, feature_keys=["easy"] * entry.min_features).select(2)) == 2


def test_the_section_seed_wins_over_the_run_seed():
    assert build(selector_type="shuffle", seed=1).select(4) != build(selector_type="shuffle").select(4)


def test_a_custom_selector_is_built_from_the_tasks():
    assert build(selector_type="mine:Last", args={"offset": 1}).select(2) == [2, 2]


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ({"selector_type": "shufle"}, ConfigError, "unknown selector 'shufle': did you mean 'shuffle'"),
        ({"selector_type": "shuffle", "feature_keys": ["easy"]}, ConfigError, "takes none of feature_keys"),
        ({"selector_type": "offline_easy2hard"}, ConfigError, "takes at least 1 of feature_keys"),
        ({"selector_type": "difficulty_based", "args": {"lamda": 0.1}}, ConfigError, "did you mean 'lamb'"),
        ({"selector_type": "difficulty_based", "args": {"rho": 1.5}}, ConfigError, "rho=1.5.*less than or equal to 1"),
        ({"selector_type": "difficulty_based", "args": {"seed": 1}}, ConfigError, "unknown argument 'seed'"),
        (
            {"selector_type": "difficulty_based", "feature_keys": ["hard"]},
            DataError,
            "t/0 has no 'hard'; its fields are easy, question",
        ),
        ({"selector_type": "difficulty_based", "feature_keys": ["question"]}, DataError, "question='q0'"),
        ({"selector_type": "mine:Last", "feature_keys": ["easy"]}, ConfigError, "does not take feature_keys"),
        ({"selector_type": "mine:build_nothing"}, ConfigError, "has no select, feedback"),
        ({"selector_type": "mine:build_unsaved"}, ConfigError, "state_dict cannot be saved as JSON"),
        ({"selector_type": "difficulty_based", "args": {"m": float("inf")}}, ConfigError, "m=inf.*finite"),
    ],
)
def test_invalid_selectors_are_refused(section, error, message):
    with pytest.raises(error, match=message):
        build(**section)


def test_operators_run_in_order_and_return_metrics():
    chain = [
        OperatorSection(name="difficulty_score", args={"feature_keys": ["easy"]}),
        OperatorSection(name="priority_order", args={"weights": {"difficulty_score": 1.0}, "top_k": 2}),
    ]
    kept, metrics = apply_task_operators(TASKS, chain, load=OWN.__getitem__)
    assert [task.index for task in kept] == [0, 1]
    assert metrics["tasks/difficulty_score/mean"] == pytest.approx(0.5)
    assert metrics["tasks/priority_order/num_removed"] == 2


def test_operators_that_leave_no_task_are_an_error():
    chain = [OperatorSection(name="length_filter", args={"field": "question", "min_chars": 99})]
    with pytest.raises(DataError, match="left no tasks"):
        apply_task_operators(TASKS, chain, load=OWN.__getitem__)


def test_weights_are_given_for_every_set_or_none():
    assert compute_weights({"a": None, "b": None}) is None
    assert compute_weights({"a": 1.0, "b": 2.0}) == {"a": 1.0, "b": 2.0}
    with pytest.raises(ConfigError, match=r"train_datasets\.b\.weight is missing"):
        compute_weights({"a": 1.0, "b": None})
