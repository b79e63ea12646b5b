"""Every algorithm has a recipe, and every recipe resolves to its algorithm."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.table import ALGORITHMS
from tunesmith.config import PreferenceConfig, SftConfig
from tunesmith.pipeline.session.load_config import load_config, load_section

RECIPES = sorted((Path(__file__).parent.parent.parent / "recipes" / "algorithms").glob("*.yaml"))


def test_every_algorithm_has_a_recipe():
    assert {path.stem for path in RECIPES} == set(ALGORITHMS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_as_its_algorithm(path, monkeypatch):
    monkeypatch.setenv("DEMO", "demo")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if "workflow" in content:
        config = load_config(path)
        assert resolve_algorithm(config.algorithm).name == path.stem
        assert config.model.path == "demo/sft/model"
    else:
        kind = PreferenceConfig if path.stem in ("dpo", "kto", "orpo", "simpo") else SftConfig
        assert load_section(kind, path).algorithm_type == path.stem
