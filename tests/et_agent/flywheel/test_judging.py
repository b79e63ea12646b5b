"""Judges of a flywheel are called as in training; what is no score is a failure, never a wrong answer."""

from __future__ import annotations

import logging

import pytest

from tunesmith import JudgeOutput
from tunesmith.environments.transcript import Segment, Transcript
from tunesmith.et_agent.flywheel.crew import judge_by_function

pytestmark = pytest.mark.anyio

TRANSCRIPT = Transcript(question="q", segments=(Segment(kind="answer", text="7"),), finish="answered")


async def test_a_judge_gets_all_that_its_signature_may_name():
    async def judge(task, response, auxiliary_models, logger):
        assert isinstance(logger, logging.Logger) and auxiliary_models == {"critic": "model"}
        return JudgeOutput(reward=float(task["answer"] == response.answer))

    assert await judge_by_function(judge, {"answer": "7"}, TRANSCRIPT, {"critic": "model"}) == 1.0


async def test_a_judge_that_changes_its_task_changes_a_copy():
    async def judge(task, response):
        return JudgeOutput(reward=float(len(task["answers"]) and task["answers"].pop() == response.answer))

    row = {"answers": ["7"]}
    assert [await judge_by_function(judge, row, TRANSCRIPT, {}) for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_not_finite_is_an_error(reward):
    async def judge(task, response):
        return JudgeOutput(reward=reward)

    with pytest.raises(ValueError, match=f"returned reward {reward}; it must be a finite number"):
        await judge_by_function(judge, {}, TRANSCRIPT, {})
    assert await judge_by_function(judge_nothing, {}, TRANSCRIPT, {}) is None


async def judge_nothing(task, response):
    return JudgeOutput(reward=None)
