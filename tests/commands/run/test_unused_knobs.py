"""Knobs of training are refused where nothing is trained, instead of being ignored."""

from __future__ import annotations

import pytest

from tunesmith.config import EvalConfig, FlywheelConfig
from tunesmith.errors import ConfigError
from tunesmith.runs.load_config import build_section

FLYWHEEL = {"model": {"path": "m"}, "train_dataset": {"path": "x"}}
EVALUATION = {"models": {"a": "m"}, "eval_datasets": {"t": {"path": "x"}}}
OPERATORS = [{"name": "deduplicate", "args": {"fields": ["question"]}}]


@pytest.mark.parametrize(
    ("kind", "values", "sentence"),
    [
        (FlywheelConfig, {"train_dataset": {"path": "x", "operators": OPERATORS}}, "train_dataset.operators has no"),
        (
            FlywheelConfig,
            {"train_dataset": {"path": "x", "task_selector": {"selector_type": "random"}}},
            "train_dataset.task_selector has no effect",
        ),
        (FlywheelConfig, {"train_dataset": {"path": "x", "weight": 2}}, "train_dataset.weight=2 has no effect"),
        (FlywheelConfig, {"rollout": {"max_staleness": 2}}, "rollout.max_staleness=2 has no effect"),
        (FlywheelConfig, {"rollout": {"branching": {}}}, "rollout.branching has no effect"),
        (FlywheelConfig, {"num_votes": 5}, "num_votes=5 has no effect without roles.judge"),
        (EvalConfig, {"rollout": {"max_staleness": 2}}, "rollout.max_staleness=2 has no effect"),
        (EvalConfig, {"rollout": {"branching": {}}}, "rollout.branching has no effect"),
    ],
)
def test_knob_without_effect_is_an_error(kind, values, sentence):
    base = FLYWHEEL if kind is FlywheelConfig else EVALUATION
    with pytest.raises(ConfigError, match=sentence):
        build_section(kind, base | values)


def test_resolved_settings_are_accepted_again():
    for kind, base in ((FlywheelConfig, FLYWHEEL), (EvalConfig, EVALUATION)):
        settings = build_section(kind, base)
        assert build_section(kind, settings.model_dump(mode="json")) == settings
    assert build_section(FlywheelConfig, FLYWHEEL | {"num_votes": 5, "roles": {"judge": "model"}}).num_votes == 5
