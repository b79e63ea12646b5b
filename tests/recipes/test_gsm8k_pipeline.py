"""The pipeline recipes: their files are valid, and the functions of the pocket recipe feed its later stages."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest

from tunesmith.commands.prepare.run import run_prepare
from tunesmith.commands.run.config import load_pipeline, plan_stages
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.config import PrepareSection
from tunesmith.model.load import load_tokenizer

RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k_pipeline"


@pytest.mark.parametrize("path", sorted(RECIPE.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_has_only_known_keys_and_stages(path):
    stages = {stage.name: stage for stage in plan_stages(load_pipeline(path))}
    assert [name for name, stage in stages.items() if name == stage.kind] == ["prepare", "sft", "rl", "eval", "export"]
    assert list(stages["eval"].values["models"]) == ["base", "sft", "grpo"]
    assert {"sft", "rl"} <= set(stages["eval"].needs)
    assert stages["export"].needs == ("rl",)


@pytest.fixture(scope="module")
def pocket(tmp_path_factory):
    """The functions of the recipe, the folder of its first stages, and the report of its preparation."""
    spec = importlib.util.spec_from_file_location("pocket_pipeline", RECIPE / "pocket.py")
    functions = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(functions)
    place = tmp_path_factory.mktemp("pocket")
    for name in ("problems", "base"):
        (place / name).mkdir()
    functions.make_problems(place / "problems", num_train=120, num_test=10, seed=3)
    values = {split: {"path": str(place / f"problems/{name}.jsonl")} for split, name in SPLITS.items()}
    report = run_prepare(PrepareSection.model_validate(values), out_dir=place / "prepare")
    functions.make_model(place / "base", conversations=str(report.train_path), seed=3)
    return functions, place, report


SPLITS = {"data": "train", "eval_data": "test"}


def test_every_problem_is_prepared_into_a_checked_conversation(pocket):
    _, _, report = pocket
    assert (report.num_train, report.num_eval) == (120, 10)
    assert report.content["train"]["dropped"] == {}


def test_the_judge_accepts_only_the_exact_number(pocket):
    functions, _, _ = pocket
    for answer, expected in (("972", 1.0), ("973", 0.0)):
        verdict = asyncio.run(functions.judge({"question": "?", "answer": "972"}, f"#### {answer}"))
        assert verdict.metrics["accuracy"] == expected


def test_the_tokenizer_encodes_conversations_in_few_tokens(pocket):
    _, place, report = pocket
    rows = [json.loads(line) for line in report.train_path.read_text().splitlines()]
    samples = ConversationReader(load_tokenizer(str(place / "base/model"))).read(rows, max_model_len=512)
    assert max(len(sample.token_ids) for sample in samples) < 140
