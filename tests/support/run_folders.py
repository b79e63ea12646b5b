"""A folder with a run file, an agent of two turns, tasks and the pocket model, for commands in their own processes."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from small_pocket import write_small_pocket
from tunesmith.monitor.metrics_file import load_metrics

AGENT = textwrap.dedent(
    """
    import asyncio
    from pathlib import Path

    from tunesmith import JudgeOutput, WorkflowOutput

    HOLD = Path(__file__).with_name("hold")

    def is_held():
        "Whether the run that the file names has written as many lines of metrics as it says."
        try:
            metrics, num_lines = HOLD.read_text().split("\\n")
        except FileNotFoundError:
            return False
        if not Path(metrics).exists() or Path(metrics).read_text().count("\\n") < int(num_lines):
            return False
        HOLD.with_name("held").touch()
        return True

    async def workflow(task, model):
        messages = [{"role": "user", "content": task["question"]}]
        first = await model(messages)
        messages += [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "How many?"},
        ]
        second = await model(messages)
        return WorkflowOutput(response=second.choices[0].message.content)

    async def judge(task, response):
        while is_held():
            await asyncio.sleep(0.02)
        return JudgeOutput(reward=float(len(response) % 5), metrics={"length": float(len(response))})
    """
)


@contextlib.contextmanager
def held_after(metrics: Path, num_lines: int) -> Iterator[None]:
    """Until the end of the block, the run of these metrics judges nothing once it has written so many lines.

    From then on there is a file `held` beside the run file: the step after those lines is under way.
    """
    hold, held = metrics.parents[3] / "hold", metrics.parents[3] / "held"
    held.unlink(missing_ok=True)
    hold.write_text(f"{metrics}\n{num_lines}")
    try:
        yield
    finally:
        hold.unlink()


def write_run_folder(folder: Path, **settings: Any) -> None:
    """Write `run.yaml` and what it names; the run selects tasks by difficulty, refills, replays and evaluates."""
    write_small_pocket(folder / "pocket")
    (folder / "agent.py").write_text(AGENT)
    questions = [f"Tom has {n} apples and buys {n + 3} more. How many apples does Tom have now?" for n in range(12)]
    (folder / "data").mkdir()
    for split in ("train", "test"):
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps({"question": q}) + "\n" for q in questions))
    config = {
        "workflow": "agent.py:workflow",
        "judge": "agent.py:judge",
        "checkpoint_root_dir": "runs",
        "save_interval_steps": 2,
        "model": {"path": "pocket", "max_model_len": 128, "max_tokens": 6, "device": "cpu"},
        "train_dataset": {
            "path": "data",
            "task_selector": {"selector_type": "difficulty_based", "args": {"m": 4, "tau": 0.1, "do_sample": True}},
        },
        "experience": {"refill_budget": 2, "replay": {"num_groups": 1}},
        "eval_datasets": {"held_out": {"path": "data", "split": "test"}},
        "engine": {"kv_cache_tokens": 8192},
        "rollout": {"chat_model": "openai"},
        "evaluation": {"interval_steps": 3, "at_start": True, "max_tasks": 4},
    }
    (folder / "run.yaml").write_text(json.dumps(config | settings))


def load_untimed_metrics(path):
    """The records of a metrics.jsonl without metrics that depend on time: all others are equal in equal runs."""
    return [{key: each for key, each in row.items() if not key.startswith("perf/")} for row in load_metrics(path)]
