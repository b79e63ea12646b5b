"""A judge with two rewards for GDPO: whether the answer is right, and how near it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith import JudgeOutput
from tunesmith.judges.numeric import extract_answer, judge_number, parse_number, read_text


async def judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """Reward 1.0 for the right number; the metrics `accuracy` and `closeness`, 1 / (1 + distance), are the rewards."""
    verdict = await judge_number(task, response)
    answer, reference = extract_answer(read_text(response)), parse_number(str(task["answer"]))
    number = None if answer is None else parse_number(answer)
    if verdict.reward is None or reference is None:
        return verdict
    closeness = 0.0 if number is None else 1 / (1 + abs(float(number - reference)))
    return JudgeOutput(reward=verdict.reward, metrics={"accuracy": verdict.reward, "closeness": closeness})
