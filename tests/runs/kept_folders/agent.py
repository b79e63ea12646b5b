"""The agent of the kept folders; the process kills itself in the rollout whose number KILL_AT names."""

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
