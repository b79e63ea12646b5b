"""A workflow and a judge that finish at once."""

from __future__ import annotations

from typing import Any

from tunesmith import JudgeOutput, WorkflowOutput


async def ask(task: dict[str, Any], model: Any) -> WorkflowOutput:
    completion = await model([{"role": "user", "content": task["question"]}])
    return WorkflowOutput(response=completion.choices[0].message.content)


async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
    return JudgeOutput(reward=float(sum(map(ord, response)) % 7))
