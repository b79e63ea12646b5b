"""The page of frameworks shows what the checks measured; tests/frameworks/run.py runs them and writes the page.

The same checks run here if TUNESMITH_FRAMEWORKS is a folder for the environments.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import outcome_table
import pytest
from cases import FEATURES
from outcome_table import (
    FEATURES_START,
    OUTCOMES,
    OUTCOMES_START,
    PAGE,
    ROOT,
    format_features,
    format_outcomes,
    read_table,
)
from run import check, find_failures, record, start_builds
from run_prompt_tuning import DSPY

from environments import FRAMEWORKS

ENVIRONMENTS = os.environ.get("TUNESMITH_FRAMEWORKS")
RECIPES = sorted((ROOT / "recipes" / "frameworks").glob("*.py"))


def test_the_page_shows_the_recorded_outcomes():
    page, outcomes = PAGE.read_text(), json.loads(OUTCOMES.read_text())
    assert read_table(page, OUTCOMES_START) == format_outcomes(outcomes)
    assert read_table(page, FEATURES_START) == format_features(outcomes)


def test_every_framework_has_an_outcome_with_its_pinned_packages():
    recorded = [(each["name"], tuple(each["packages"])) for each in json.loads(OUTCOMES.read_text())]
    assert recorded == [(framework.name, framework.packages) for framework in FRAMEWORKS]


@pytest.mark.parametrize("outcome", json.loads(OUTCOMES.read_text()), ids=lambda outcome: outcome["name"])
def test_every_feature_passed_or_is_said_to_be_absent(outcome):
    assert outcome["ok"]
    assert outcome["features"].keys() == FEATURES.keys()
    assert all("absent" in each or each["ok"] for each in outcome["features"].values())


def test_an_outcome_is_written_in_place_of_the_last_one_and_the_others_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(outcome_table, "OUTCOMES", tmp_path / "outcomes.json")
    monkeypatch.setattr(outcome_table, "PAGE", tmp_path / "page.md")
    outcome_table.PAGE.write_text(PAGE.read_text())
    first, second, third = json.loads(OUTCOMES.read_text())[:3]
    for outcome in (third, first, second, first | {"ok": False, "error": "no package"}):
        record(outcome)
    recorded = json.loads(outcome_table.OUTCOMES.read_text())
    assert recorded == [first | {"ok": False, "error": "no package"}, second, third]
    assert read_table(outcome_table.PAGE.read_text(), OUTCOMES_START) == format_outcomes(recorded)
    assert {path.name for path in tmp_path.iterdir()} == {"outcomes.json", "page.md"}


@pytest.mark.skipif(ENVIRONMENTS is None, reason="agents of other frameworks; TUNESMITH_FRAMEWORKS is not set")
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_agents_of_the_framework_train(framework):
    folder = Path(ENVIRONMENTS or "").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    build = start_builds([framework], folder)[framework.environment]
    assert not find_failures(check(FRAMEWORKS.index(framework), framework, build, folder))


def test_prompt_tuning_is_tested_with_the_version_of_dspy_that_agents_are_tested_with():
    (version,) = {package.partition("==")[2] for each in FRAMEWORKS for package in each.packages if "dspy" in package}
    assert DSPY.packages[0] == f"dspy[optuna]=={version}"


def test_a_failed_check_shows_its_reason():
    outcome = {"name": "A", "packages": ["a==1"], "ok": False, "error": "Traceback\nValueError: a|b"}
    assert format_outcomes([outcome]).splitlines()[-1] == "| A | a==1 |  |  |  |  |  | failed: ValueError: a b |"


def test_a_cell_of_the_features_is_a_pass_a_failure_or_the_reason_why_there_is_none():
    cases = {
        "sub_agents": {"ok": True, "branches": 2},
        "parallel_calls": {"ok": False, "error": "AssertionError: a"},
        "structured": {"absent": "for a reason"},
        "streaming": {"absent": ""},
    }
    row = format_features([{"name": "A", "features": cases}]).splitlines()[-1]
    assert row == "| A | pass, 2 | failed: AssertionError: a | for a reason | - | not run | not run |"


def test_merged_tokens_are_shown_as_the_share_that_they_save():
    numbers = {"turns": 4, "branches": 0, "call_tokens": 1056, "merged_tokens": 264}
    outcome = {"name": "A", "packages": ["a==1"], "ok": True, "error": None} | numbers
    assert format_outcomes([outcome]).splitlines()[-1] == "| A | a==1 | 4 | 0 | 1,056 | 264 | 75% | passed |"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_linked_and_checked(path):
    assert len(path.read_text().splitlines()) <= 40
    assert f"../recipes/frameworks/{path.name}" in PAGE.read_text()
    assert path.stem in {framework.recipe for framework in FRAMEWORKS}
