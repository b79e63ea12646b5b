"""The page of frameworks shows what the checks measured; the checks themselves run by tests/frameworks/run.py."""

from __future__ import annotations

import json

import pytest
from outcome_table import OUTCOMES, PAGE, ROOT, format_outcomes, read_table

from environments import FRAMEWORKS

RECIPES = sorted((ROOT / "recipes" / "frameworks").glob("*.py"))


def test_the_page_shows_the_recorded_outcomes():
    assert read_table(PAGE.read_text()) == format_outcomes(json.loads(OUTCOMES.read_text()))


def test_every_framework_has_an_outcome_with_its_pinned_packages():
    recorded = [(each["name"], tuple(each["packages"])) for each in json.loads(OUTCOMES.read_text())]
    assert recorded == [(framework.name, framework.packages) for framework in FRAMEWORKS]


def test_a_failed_check_shows_its_reason():
    outcome = {"name": "A", "packages": ["a==1"], "ok": False, "error": "Traceback\nValueError: a|b"}
    assert format_outcomes([outcome]).splitlines()[-1] == "| A | a==1 |  |  |  |  | failed: ValueError: a b |"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_short_linked_and_checked(path):
    assert len(path.read_text().splitlines()) <= 40
    assert f"../recipes/frameworks/{path.name}" in PAGE.read_text()
    assert path.stem in {framework.recipe for framework in FRAMEWORKS}
