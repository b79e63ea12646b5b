"""The recipe of an own algorithm trains the pocket model, and the example in the docs satisfies the contracts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tunesmith import JudgeOutput, WorkflowOutput, tune
from tunesmith.algorithms.advantages.group import RunOutcome
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.algorithms.own_functions import OwnFunctions
from tunesmith.config import AlgorithmSection

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "recipes/own_algorithm/config.yaml"


async def ask(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)


async def judge_letters(task, response):
    return JudgeOutput(reward=float(sum(map(ord, response)) % 3))


def test_the_recipe_trains_and_publishes_its_best_checkpoint(tmp_path, pocket_folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DEMO", str(tmp_path))
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        rows = [{"question": f"Tom has {n} apples. How many?"} for n in range(4)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = {
        "model.path": pocket_folder, "model.max_model_len": 128, "model.max_tokens": 6, "total_steps": 2,
        "engine.kv_cache_tokens": 8192, "checkpoint_root_dir": tmp_path / "runs", "algorithm.batch_size": 2,
        "algorithm.group_size": 4, "evaluation.interval_steps": 1, "rollout.chat_model": "openai",
    }  # fmt: skip
    result = tune(
        workflow_func=ask, judge_func=judge_letters, config_path=RECIPE,
        overrides=[f"{key}={value}" for key, value in small.items()],
    )  # fmt: skip
    assert result.metrics["train/grad_norm"] > 0
    assert 0 <= result.metrics["train/own_clip_frac"] <= 1
    assert result.best_checkpoint == result.folder / (result.folder / "best").readlink()
    published = (result.folder / "published/model.safetensors").read_bytes()
    assert published == (result.best_checkpoint / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def example():
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(# my_algorithm.py\n.*?)```", text, flags=re.DOTALL)[1]
    names = {}
    exec(compile(code, "my_algorithm.py", "exec"), names)
    return names


def test_the_example_of_the_docs_satisfies_the_contracts(example):
    own = OwnFunctions(advantage=example["advantages"], loss=example["loss"])
    section = AlgorithmSection(
        algorithm_type="grpo", advantage="my_algorithm.py:advantages", loss="my_algorithm.py:loss"
    )
    algorithm = resolve_algorithm(section, own=own)
    groups = [[RunOutcome(reward=reward, num_turns=1) for reward in row] for row in ([0.0, 1.0, 1.0], [1.0, 1.0])]
    assert algorithm.compute_advantages(groups) == [[-1.0, 0.0, 0.0], [None, None]]
