"""Ways to fail that no tiny run shows in seconds, from metrics written by hand.

They are: a growing mismatch, entropy that explodes, a moderate growth of the KL, dead steps of a schedule, rewards that
fall or stay flat for dozens of steps, growing responses, replay of stale groups. Each has a
counterpart just within its limit.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from suggested_settings import check_settings

from tunesmith.commands.doctor.diagnose import run_check
from tunesmith.commands.doctor.optimizer import (
    find_dead_learning_rate,
    find_entropy,
    find_kl,
    find_mismatch,
)
from tunesmith.commands.doctor.record import CheckFinding, compute_slope_t, find_longest_streak, open_run, split_ends
from tunesmith.commands.doctor.rewards import find_reward_trend
from tunesmith.config import ModelSection, RunConfig
from tunesmith.monitor.metrics_file import Series, append_metrics
from tunesmith.runs.load_config import dump_config

RISING = np.linspace(0, 1, 40)


@pytest.fixture
def build_record(tmp_path):
    """Writes a run folder with metrics of 40 steps, or of `num_steps`; returns its record."""
    numbers = itertools.count()

    def build(metrics, *, num_steps=40, **settings):
        root = tmp_path / str(next(numbers))
        root.mkdir()
        (root / "config.yaml").write_text(dump_config(RunConfig(model=ModelSection(path="m"), **settings)))
        values = {name: np.broadcast_to(np.asarray(value, float), (num_steps,)) for name, value in metrics.items()}
        for index in range(num_steps):
            of_step = {name: each[index] for name, each in values.items()}
            append_metrics(root / "metrics.jsonl", index + 1, "train", of_step)
        return open_run(root)

    return build


def noise(size=0.01):
    return np.random.default_rng(0).normal(size=40) * size


UNSOLVED = {"rollout/reward_mean": 0.3, "rollout/reward_min": 0.0, "rollout/reward_max": 1.0}
SOLVED = UNSOLVED | {"rollout/reward_mean": 0.95}
CASES = {
    "mismatch grows": (find_mismatch, {"mismatch/kl": np.geomspace(1e-4, 8e-3, 40)}, {"mismatch/kl": 2e-3}),
    "mismatch above the warning": (
        find_mismatch,
        {"mismatch/kl": 0.02},
        {"mismatch/kl": np.geomspace(1e-13, 1e-9, 40)},
    ),
    "entropy collapses": (
        find_entropy,
        UNSOLVED | {"train/entropy": np.geomspace(1.0, 1e-3, 40)},
        SOLVED | {"train/entropy": np.geomspace(1.0, 1e-3, 40)},
    ),
    "entropy explodes": (find_entropy, {"train/entropy": 0.5 + 4 * RISING}, {"train/entropy": 0.5 + RISING}),
    "kl is high": (find_kl, {"train/kl": 3.0}, {"train/kl": 0.1 + 0.3 * RISING}),
    "kl grows": (find_kl, {"train/kl": 1.5 * RISING}, {"train/kl": 1.0}),
    "reward falls": (
        find_reward_trend,
        UNSOLVED | {"rollout/reward_mean": 0.8 - 0.6 * RISING + noise()},
        UNSOLVED | {"rollout/reward_mean": 0.5 + noise(0.1)},
    ),
    "a schedule with dead steps": (
        find_dead_learning_rate,
        {"train/learning_rate": np.where(np.arange(40) < 25, 1e-6, 1e-12)},
        {"train/learning_rate": 1e-6 * (1 + np.cos(np.pi * np.arange(40) / 40)) / 2},
    ),
    "weights that do not change": (
        find_dead_learning_rate,
        {"train/learning_rate": 1e-6, "train/relative_update": 9e-7},
        {"train/learning_rate": 1e-6, "train/relative_update": 2e-6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_check_finds_its_failure_and_accepts_what_is_just_within_its_limit(case, build_record):
    check, failing, healthy = CASES[case]
    record = build_record(failing)
    finding = run_check(check, record)
    assert isinstance(finding, CheckFinding), finding
    assert finding.evidence[0].source in failing and finding.change
    check_settings(finding, record.config)
    passed = run_check(check, build_record(healthy))
    assert isinstance(passed, str) and passed


def test_a_flat_reward_is_reported_after_fifty_steps_only(build_record):
    def judge(number):
        values = 0.3 + 0.05 * (-1.0) ** np.arange(number)
        names = {"rollout/reward_mean": values, "rollout/reward_min": 0.0, "rollout/reward_max": 1.0}
        return find_reward_trend(build_record(names, num_steps=number))

    assert "has not changed beyond its noise in 60 steps" in judge(60).problem
    assert isinstance(judge(40), str)


def test_rewards_are_not_compared_when_tasks_are_chosen_by_difficulty(build_record):
    falling = UNSOLVED | {"rollout/reward_mean": 0.8 - 0.6 * RISING}
    selector = {"selector_type": "difficulty_based"}
    record = build_record(falling, train_dataset={"path": "d", "task_selector": selector})
    assert find_reward_trend(record) is None


def test_checks_without_their_metrics_do_not_apply(build_record):
    record = build_record({"train/num_updates": 1.0})
    for check, *_ in CASES.values():
        assert run_check(check, record) is None


def test_series_statistics_match_numbers_worked_by_hand():
    series = Series(name="x", steps=np.arange(1, 5), values=np.array([1.0, 2.0, 2.0, 3.0]))
    assert compute_slope_t(series) == pytest.approx(0.6 / math.sqrt(0.2 / 2 / 5))
    assert split_ends(series) is None
    assert find_longest_streak(np.array([True, False, True, True, False])) == 2
    assert series.span == (1, 4)
