"""Every algorithm has a recipe, and every recipe resolves to its algorithm."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import yaml

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.config import PreferenceConfig, RunConfig, SftConfig
from tunesmith.runs.load_config import load_section
from tunesmith.runs.load_function import load_function

RECIPES = sorted((Path(__file__).parent.parent.parent / "recipes" / "algorithms").glob("*.yaml"))


def test_every_algorithm_has_a_recipe():
    assert {path.stem for path in RECIPES} == set(ALGORITHMS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_as_its_algorithm(path, monkeypatch):
    monkeypatch.setenv("DEMO", "demo")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "workflow" in content:
        config = load_section(RunConfig, path)
        assert resolve_algorithm(config.algorithm).name == path.stem
        assert config.model.path == "demo/sft/model"
    else:
        kind = PreferenceConfig if path.stem in ("dpo", "kto", "orpo", "simpo") else SftConfig
        assert load_section(kind, path).algorithm_type == path.stem


@pytest.mark.parametrize(
    ("response", "metrics"),
    [
        ("The answer is 42.", {"accuracy": 1.0, "closeness": 1.0}),
        ("The answer is 45.", {"accuracy": 0.0, "closeness": 0.25}),
        ("I do not know.", {"accuracy": 0.0, "closeness": 0.0}),
    ],
)
def test_the_judge_of_gdpo_reports_both_rewards(response, metrics):
    judge = load_function(f"{RECIPES[0].parent / 'two_rewards.py'}:judge", knob="judge")
    verdict = asyncio.run(judge({"answer": "42"}, response))
    assert verdict.metrics == metrics and verdict.reward == metrics["accuracy"]
