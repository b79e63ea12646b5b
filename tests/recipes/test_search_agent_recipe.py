"""The search agent's recipe: its questions, records and demonstrations."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from search_corpora import needs_bm25
from tunesmith.retrieval import SearchIndex

pytestmark = needs_bm25
RECIPE = Path(__file__).parents[2] / "recipes" / "tool_agent"
WORLD = {"num_documents": 80, "num_train": 60, "num_test": 20, "distractors_per_entity": 0, "irrelevant_share": 0.02}


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("search_agent_recipe", RECIPE / "search_agent.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def world(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    recipe.prepare_world(folder, world=WORLD)
    return folder


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def demonstrate(recipe, world, folder, **shares):
    folder.mkdir()
    tool = {"tool": "search", "settings": {"source": "index", "index": str(world / "index"), "top_n": 1}}
    environment = {"prompt": "none", "max_calls": 5, "tools": [tool]}
    figures = recipe.write_demonstrations(
        folder, world=WORLD, environment=environment, num_conversations=150, seed=0, **shares
    )
    return figures, read(folder / "conversations.jsonl")


def test_train_and_test_questions_are_about_different_entities(world):
    train, test = read(world / "train.jsonl"), read(world / "test.jsonl")
    assert len(train) > 50 and len(test) > 10
    assert {row["kind"] for row in test} == {"multi_hop", "comparison"}
    named = [{entity for row in rows for entity in row["entities"]} for rows in (train, test)]
    assert not named[0] & named[1]
    assert not {row["question"] for row in train} & {row["question"] for row in test}


def test_a_search_for_a_name_returns_its_record(recipe, world):
    index = SearchIndex(world / "index")
    for row in read(world / "records.jsonl"):
        (hit,) = index.search(row["title"], 1)
        assert hit.contents == f"{row['title']}\n{row['text']}"


def test_demonstrations_are_about_other_editions_and_do_not_repeat(recipe, world, tmp_path):
    _, rows = demonstrate(recipe, world, tmp_path / "plain")
    results = {part["text"] for row in rows for part in row["messages"][1]["content"] if not part["weight"]}
    known = {f"\n<result>\n{row['title']}\n{row['text']}\n</result>\n" for row in read(world / "records.jsonl")}
    assert results and not results & known
    assert len({json.dumps(row) for row in rows}) == len(rows) == 150
    for row in rows:
        *_, last = row["messages"][1]["content"]
        answer = last["text"].split("\\boxed{")[1].split("}")[0]
        found = "".join(part["text"] for part in row["messages"][1]["content"] if not part["weight"])
        assert answer in ("yes", "no") or answer in found


def test_habits_waste_calls_and_guess(recipe, world, tmp_path):
    plain, _ = demonstrate(recipe, world, tmp_path / "plain")
    wasteful, _ = demonstrate(recipe, world, tmp_path / "wasteful", repeat_share=1.0, detour_share=1.0)
    assert wasteful["calls"] == plain["calls"] + 2 * 150
    guessed, rows = demonstrate(recipe, world, tmp_path / "guessed", guess_share=1.0)
    assert 0 < guessed["calls"] < plain["calls"]
    assert sum(len(row["messages"][1]["content"]) == 1 for row in rows) > 50
