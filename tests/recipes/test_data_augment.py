"""The data-augment recipe: rows become questions, answers and pass rates; `tune()` accepts its workflow and judge."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path

import pytest

from tunesmith.rollout.signature import check_judge_function, check_workflow_function

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "data_augment"
ROW = {
    "prompt": [{"role": "user", "content": "What is 2 + 2? Please output the final answer within \\boxed{}."}],
    "reward_model": {"ground_truth": "4"},
    "qwen2.5_7b_pass_rate": 0.5,
    "qwen3_30b_pass_rate": 1,
}


@pytest.fixture(scope="module")
def prepare():
    return runpy.run_path(str(RECIPE / "prepare_data.py"))


def test_a_row_becomes_a_question_an_answer_and_its_pass_rates(prepare):
    assert prepare["transform_train_row"](ROW) == {
        "question": "What is 2 + 2?",
        "answer": "#### 4",
        "qwen2.5_7b_pass_rate": 0.5,
        "qwen3_30b_pass_rate": 1,
    }


@pytest.mark.parametrize(
    "missing",
    [{"prompt": []}, {"reward_model": None}, {"qwen3_30b_pass_rate": None}, {"qwen2.5_7b_pass_rate": float("nan")}],
)
def test_a_row_with_a_missing_field_is_dropped_and_counted(prepare, tmp_path, capsys, missing):
    prepare["save_rows"](tmp_path / "x" / "train.jsonl", map(prepare["transform_train_row"], [ROW, ROW | missing]))
    rows = (tmp_path / "x" / "train.jsonl").read_text().splitlines()
    assert [json.loads(row)["answer"] for row in rows] == ["#### 4"]
    assert "1 rows, 1 dropped" in capsys.readouterr().out


def test_tune_accepts_the_workflow_and_the_judge():
    pytest.importorskip("agentscope")
    main = runpy.run_path(str(RECIPE / "main.py"))
    check_workflow_function(main["run_react_agent"])
    check_judge_function(main["gsm8k_judge"])
    judged = asyncio.run(main["gsm8k_judge"]({"answer": "#### 4"}, "so it is \\boxed{4}"))
    assert judged.reward == 1.0
