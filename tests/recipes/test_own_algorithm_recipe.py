"""The recipe of an own algorithm trains the pocket model, and the example in the docs satisfies the contracts."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tunesmith import JudgeOutput, StepEnd, Stop, WorkflowOutput, tune
from tunesmith.algorithms.advantages.group import RunOutcome
from tunesmith.algorithms.algorithm import resolve_algorithm
from tunesmith.commands.tune.callbacks import load_callbacks
from tunesmith.config import AlgorithmSection, CallbacksSection
from tunesmith.runs.load_function import CustomComponents

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


def run_example(page, name):
    """The names that a Python block of the docs defines; its first line is a comment with its file name."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code = re.search(rf"```python\n(# {name}\n.*?)```", text, flags=re.DOTALL)[1]
    names = {}
    exec(compile(code, name, "exec"), names)
    return names


def test_the_functions_in_the_docs_satisfy_the_contracts():
    example = run_example("algorithms.md", "my_algorithm.py")
    functions = {"algorithm.advantage": example["advantages"], "algorithm.loss": example["loss"]}
    section = AlgorithmSection(
        algorithm_type="grpo", advantage="my_algorithm.py:advantages", loss="my_algorithm.py:loss"
    )
    algorithm = resolve_algorithm(section, functions=functions)
    groups = [[RunOutcome(reward=reward, num_turns=1) for reward in row] for row in ([0.0, 1.0, 1.0], [1.0, 1.0])]
    assert algorithm.compute_advantages(groups) == [[-1.0, 0.0, 0.0], [None, None]]


def test_the_callbacks_in_the_docs_have_the_right_signatures():
    example = run_example("pipeline.md", "my_callbacks.py")
    given = {"on_step_end": example["watch"], "on_evaluation": example["report"], "on_checkpoint": example["push"]}
    custom = CustomComponents(functions={f"callbacks.{name}": function for name, function in given.items()})
    assert load_callbacks(CallbacksSection(), custom) == given
    record = StepEnd(step=1, total_steps=2, folder=ROOT, metrics={"train/kl": 0.6}, groups=(), advantages=())
    assert example["watch"](record) == Stop("the policy is too far from the starting model")
