"""Writes `kept_folders/`: folders of commands that were killed or have finished, which later versions must resume.

    PYTHONPATH=. python tests/runs/write_kept_folders.py

Every command runs once, in a process of its own, with a model of 22 thousand parameters; training writes adapters, so
that checkpoints are small. Files name the folder that they were written in, `FOLDER`, so the tests copy them there.
The folders in the repository were written by an earlier version and are not written again: when the layout of a folder
changes, add the new one beside them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tunesmith.model.pocket import build_pocket_model, build_pocket_tokenizer

FOLDER, KEPT = Path("/tmp/tunesmith-kept-folders"), Path(__file__).parent / "kept_folders"
LIMITS = {"max_model_len": 1024, "device": "cpu"}
SAMPLED = {"path": "model", **LIMITS, "max_tokens": 4}
TRAINED = {"path": "model", **LIMITS, "lora": {"r": 1}}
QUIET = {"trackers": [], "has_progress": False}
AGENT = {
    "workflow": "agent.py:workflow",
    "judge": "agent.py:judge",
    "engine": {"kv_cache_tokens": 8192},
    "rollout": {"chat_model": "openai"},
}
FUNCTIONS = '''"""The agent of the kept folders; the process kills itself in the rollout whose number KILL_AT names."""

from __future__ import annotations

import os
import signal
from itertools import count
from pathlib import Path

from tunesmith import JudgeOutput, WorkflowOutput
from tunesmith.et_agent.flywheel.roles import Finding, StepDraft

CALLS = count(1)


def count_call():
    if next(CALLS) == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), signal.SIGKILL)


async def workflow(task, model):
    count_call()
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)


async def judge(task, response):
    if not isinstance(response, str):  # a transcript of the flywheel
        count_call()
        response = response.text
    return JudgeOutput(reward=float(len(response) % 3 == 0))


async def search(query: str) -> str:
    "Search."
    return f"{query} was founded in 1748."


def analyst(request):
    return Finding(step=len(request.steps), reason="It is odd.")


def author(request):
    if request.goal == "replace_step":
        return StepDraft(thought="I look.", tool="search", text=request.row["question"])
    return "I think again." if request.goal == "reflect" else [f"{each} In short." for each in request.thoughts]


def make(out_dir, num_rows):
    for name in ("train", "test"):
        out_dir.joinpath(f"{name}.jsonl").write_text(Path("problems.jsonl").read_text())
    return {"rows": num_rows}
'''


def write_inputs() -> None:
    """The model, the data and a file of settings for each command."""
    tokenizer = build_pocket_tokenizer(vocabulary_size=300)
    tokenizer.save_pretrained("model")
    build_pocket_model(tokenizer, hidden_size=32, num_layers=1).to(torch.bfloat16).save_pretrained("model")
    Path("agent.py").write_text(FUNCTIONS)
    write_rows("tasks", [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(6)])
    asked = [{"role": "user", "content": f"What is {n} * 7?"} for n in range(6)]
    answered = [{"role": "assistant", "content": str(7 * n)} for n in range(6)]
    write_rows("conversations", [{"messages": pair} for pair in zip(asked, answered, strict=True)])
    write_rows("pairs", [{"prompt": f"{n} * 7?", "chosen": str(7 * n), "rejected": "No."} for n in range(6)])
    problem = "Tom has {n} apples and buys 7. How many in the end?"
    solution = "We add what Tom has and buys: <<{n}+7={m}>>{m} apples.\n#### {m}"
    write_rows(
        "problems", [{"question": problem.format(n=n), "answer": solution.format(n=n, m=n + 7)} for n in range(10, 14)]
    )
    write_rows("passages", [{"id": str(n), "contents": f"House {n} was built in {1700 + n}."} for n in range(4)])
    run = {
        **AGENT,
        "model": SAMPLED,
        "train_dataset": {"path": "tasks.jsonl"},
        "algorithm": {"batch_size": 2, "group_size": 2},
    }
    training = {"model": TRAINED, "max_tokens_per_batch": 64, "save_interval_steps": 2, "monitor": QUIET}
    write_settings(
        tune=run
        | {
            "model": SAMPLED | {"lora": {"r": 1}},
            "checkpoint_root_dir": "runs",
            "name": "killed",
            "total_steps": 4,
            "save_interval_steps": 2,
            "trainer": {"learning_rate": 1e-3},
            "monitor": QUIET,
        },
        sft=training
        | {"train_dataset": {"path": "conversations.jsonl"}, "trainer": {"learning_rate": 1e-3}, "num_epochs": 8},
        prefer=training
        | {"train_dataset": {"path": "pairs.jsonl"}, "trainer": {"learning_rate": 1e-4}, "num_epochs": 1},
        pass_rate=run,
        eval=AGENT
        | {
            "models": {"first": "model", "second": "model"},
            "model": {**LIMITS, "max_tokens": 4},
            "eval_datasets": {"first_set": {"path": "tasks.jsonl"}, "second_set": {"path": "problems.jsonl"}},
            "has_progress": False,
        },
        prepare={
            "data": {"path": "problems.jsonl"},
            "pass_rate": {"models": {"tiny": SAMPLED}, "num_samples": 1, "batch_size": 2, "engine": AGENT["engine"]},
        },
        prepared={"data": {"path": "problems.jsonl"}},
        pipeline={
            "folder": "pipeline",
            "stages": {
                "make": {"kind": "function", "function": "agent.py:make", "args": {"num_rows": 4}},
                "prepare": {"data": {"path": "stage:make/train.jsonl"}},
                "flywheel": {
                    "model": SAMPLED,
                    "roles": {"analyst": "agent.py:analyst", "author": "agent.py:author"},
                    "environment": {"tools": ["agent.py:search"], "max_tokens": 16, "prompt": "none"},
                    "judge": "agent.py:judge",
                    "train_dataset": {"path": "tasks.jsonl"},
                    "extra_tokens": 8,
                    "num_iterations": 1,
                    "max_per_question": 3,
                    "batch_size": 3,
                    "engine": AGENT["engine"],
                    "rollout": AGENT["rollout"],
                    "has_progress": False,
                },
            },
        },
    )


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_settings(**files: Any) -> None:
    for name, values in files.items():
        Path(f"{name}.yaml").write_text(json.dumps(values, indent=1) + "\n")


def start(*arguments: str, kill_at: int = 0) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tunesmith", *arguments], env=os.environ | {"KILL_AT": str(kill_at)})


def run(*arguments: str, kill_at: int = 0) -> None:
    """Run a command to its end, or until it kills itself."""
    status = start(*arguments, kill_at=kill_at).wait()
    assert status == (-9 if kill_at else 0), (arguments, status)


def run_until(condition: Callable[[], bool], *arguments: str) -> None:
    """Run a command that calls no function of `agent.py`, and kill it once the condition holds."""
    process = start(*arguments)
    while not condition():
        assert process.poll() is None, arguments
        time.sleep(0.001)
    process.kill()
    process.wait()


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    os.chdir(FOLDER)
    write_inputs()
    run("tune", "tune.yaml", kill_at=14)  # in the fourth step, so that files of the third are not committed
    metrics = Path("sft/metrics.jsonl")
    run_until(
        lambda: metrics.exists() and metrics.read_text().count("\n") >= 3 and not list(Path("sft").glob("*.tmp-*")),
        *("sft", "sft.yaml", "--out", "sft"),
    )
    run("prefer", "prefer.yaml", "--out", "prefer")
    run("pass-rate", "pass_rate.yaml", "--field", "rate", "--runs", "2", "--out", "rated.jsonl", kill_at=7)
    run("eval", "eval.yaml", "--out", "eval", kill_at=8)
    work = Path("prepare.work")
    run_until(
        lambda: any(each.stat().st_size for each in work.glob("*.part")),
        *("prepare", "prepare.yaml", "--out", "prepare"),
    )
    run("prepare", "prepared.yaml", "--out", "prepared")
    run("export", "prefer", "--out", "export", "--set", "formats=[adapter]")
    run("search", "build", "passages.jsonl", "--out", "index")
    run("run", "pipeline.yaml", kill_at=8)
    shutil.copytree(FOLDER, KEPT, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


if __name__ == "__main__":
    main()
