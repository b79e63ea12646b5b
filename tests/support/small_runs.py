"""Runs of `tune()` on the untrained pocket model: one model call per rollout, rewards that differ, small settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tunesmith import AlgorithmConfig, DatasetConfig, JudgeOutput, TuneResult, TunerModelConfig, WorkflowOutput, tune

PLAIN = ("rollout.chat_model=openai", "model.device=cpu", "engine.kv_cache_tokens=8192")


async def ask(task, model):
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)


async def judge_letters(task, response):
    """A reward from 0 to 6 that differs between most responses."""
    return JudgeOutput(reward=float(sum(map(ord, response)) % 7))


def list_apples(number: int) -> list[dict[str, Any]]:
    return [{"question": f"Tom has {n} apples. How many?", "answer": str(n)} for n in range(number)]


def write_splits(folder: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write the rows as the splits `train` and `test` of a data set; returns its path."""
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(text)
    return str(folder)


def build_small_run(
    folder: Path, model: str, data: str, *settings: str, max_model_len: int = 128, max_tokens: int = 4, steps: int = 2,
    **defaults: Any,
) -> Callable[..., TuneResult]:  # fmt: skip
    """A function that calls `tune()`: its arguments replace those given here, its overrides come after `settings`.

    Runs are written below `folder`/runs, under the name x.
    """
    place = f"checkpoint_root_dir={folder / 'runs'}"
    base = {
        "workflow_func": ask,
        "judge_func": judge_letters,
        "train_dataset": DatasetConfig(path=data, total_steps=steps),
        "model": TunerModelConfig(model_path=model, max_model_len=max_model_len, max_tokens=max_tokens),
        "algorithm": AlgorithmConfig(group_size=4, batch_size=2, learning_rate=1e-3),
        "experiment_name": "x",
    }

    def call(*overrides: str, **arguments: Any) -> TuneResult:
        return tune(**(base | defaults | arguments), overrides=(*PLAIN, place, *settings, *overrides))

    return call
