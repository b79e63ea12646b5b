"""GSM8K: one question, one chain of thought, one number; the judge compares it with the reference answer.

The workflow uses `model.client`, the OpenAI client of every model that workflows receive, so it runs with and without
AgentScope. The reference may be the solution of the data set: the number after its `####` is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith import JudgeOutput, WorkflowOutput
from tunesmith.judges.numeric import score_numeric

INSTRUCTION = "Solve the problem step by step. End with one line: The answer is <number>."


async def solve(task: Mapping[str, Any], model: Any) -> WorkflowOutput:
    """Ask once and return the text of the reply."""
    completion = await model.client.chat.completions.create(
        model=model.model_name,
        messages=[{"role": "user", "content": f"{task['question']}\n\n{INSTRUCTION}"}],
    )
    return WorkflowOutput(response=completion.choices[0].message.content or "")


async def judge(task: Mapping[str, Any], response: str) -> JudgeOutput:
    """Reward 1.0 for the correct final number, else 0.0."""
    score = score_numeric(response, task["answer"])
    has_statement = float("answer is" in response.lower())
    return JudgeOutput(reward=score, metrics={"accuracy": score or 0.0, "states_answer": has_statement})
