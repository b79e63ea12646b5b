"""Correctness of a trajectory: by a judge function, or by votes of a model.

Every answer gets the same number of votes whatever the first ones say, so the verdict is not biased to yes or to no. A
tie, or no readable vote, is no verdict: the trajectory is left out, not scored 0.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.environments.transcript import Transcript
from tunesmith.judges.llm import quote
from tunesmith.judges.redundancy import ask_for_vote
from tunesmith.judges.squad import list_accepted
from tunesmith.judges.tir import PROMPT
from tunesmith.rollout.signature import list_parameters
from tunesmith.types import JudgeOutput, JudgeType

logger = logging.getLogger(__name__)


async def judge_by_function(
    judge: JudgeType, row: Mapping[str, Any], transcript: Transcript, auxiliary_models: Mapping[str, Any]
) -> float | None:
    """The reward of a judge, which receives what it receives in training, and a copy of the row of its own."""
    available = {"response": transcript, "auxiliary_models": dict(auxiliary_models), "logger": logger}
    arguments = {name: available[name] for name in list_parameters(judge) & available.keys()}
    verdict = await judge(task=copy.deepcopy(dict(row)), **arguments)  # type: ignore[arg-type]
    if not isinstance(verdict, JudgeOutput):
        raise TypeError(f"the judge must return a JudgeOutput, got {type(verdict).__name__}")
    if verdict.reward is not None and not math.isfinite(verdict.reward):
        raise ValueError(f"the judge returned reward {verdict.reward}; it must be a finite number")
    return verdict.reward


async def judge_by_votes(model: Any, row: Mapping[str, Any], transcript: Transcript, num_votes: int) -> float | None:
    """1.0 or 0.0 by the majority of exactly `num_votes` votes; None for a tie; 0.0 without an answer."""
    if not transcript.answer:
        return 0.0
    prompt = PROMPT.format(
        question=quote(transcript.question),
        reference=quote("\n".join(list_accepted(row))),
        answer=quote(transcript.answer),
    )
    return count_votes([await ask_for_vote(model, prompt) for _ in range(num_votes)])


def count_votes(votes: Sequence[bool | None]) -> float | None:
    """The side with more votes; None for a tie."""
    num_yes, num_no = sum(vote is True for vote in votes), sum(vote is False for vote in votes)
    return None if num_yes == num_no else float(num_yes > num_no)
