"""Errors, timeouts and blocking code of a workflow or judge are failures with place and cause, never rewards."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import re

import numpy
import openai
import pytest
import torch
from single_run import TASK, answer, build_service, call_model, run

from conditions import until
from tunesmith.rollout.runner import Agent, run_trajectory
from tunesmith.rollout.watchdog import EventLoopWatchdog
from tunesmith.types import Failure, JudgeOutput, WorkflowOutput

pytestmark = pytest.mark.anyio


async def raising(task, model):
    await call_model(model)
    raise RuntimeError("first line\nsecond line")


async def missing_field(task, model):
    await call_model(model)
    return task["answer"]


async def wrong_type(task, model):
    return await call_model(model)


async def foreign_output(task, model):
    class WorkflowOutput:
        pass

    await call_model(model)
    return WorkflowOutput()


async def not_finite(task, model):
    await call_model(model)
    return WorkflowOutput(reward=math.nan)


async def absurd(task, model):
    await call_model(model)
    return WorkflowOutput(reward=1e308)


async def absurd_metric(task, model):
    await call_model(model)
    return WorkflowOutput(reward=1, metrics={"m": -1e308})


async def no_reward(task, model):
    await call_model(model)
    return WorkflowOutput(response="x")


async def bad_metric(task, model):
    await call_model(model)
    return WorkflowOutput(reward=1, metrics={"m": math.inf})


async def reward_as_text(task, model):
    await call_model(model)
    return WorkflowOutput(reward="0.5")


async def metric_as_text(task, model):
    await call_model(model)
    return WorkflowOutput(reward=1, metrics={"m": "0.5"})


async def silent(task, model):
    return WorkflowOutput(reward=1.0)


async def leaving(task, model):
    await call_model(model)
    raise SystemExit(3)


async def cancelling(task, model):
    await call_model(model)
    raise asyncio.CancelledError


async def grouped(task, model):
    async with asyncio.TaskGroup() as group:
        group.create_task(raising(task, model))


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (raising, "RuntimeError: first line"),
        (grouped, "RuntimeError: first line"),
        (missing_field, "KeyError: 'answer' (fields of the task: question, tags)"),
        (wrong_type, "the workflow must return a WorkflowOutput, got str"),
        (
            foreign_output,
            "the workflow must return a WorkflowOutput, got test_runner_failures.foreign_output.<locals>.",
        ),
        (not_finite, "the workflow returned reward nan; it must be a finite number"),
        (absurd, "the workflow returned reward 1e+308; it must be within 1e+09 of 0"),
        (absurd_metric, "the workflow returned metric m=-1e+308; it must be within 1e+100 of 0"),
        (no_reward, "neither the workflow nor a judge returned a reward"),
        (bad_metric, "the workflow returned metric m=inf; it must be a finite number"),
        (reward_as_text, "ValidationError: WorkflowOutput.reward='0.5': Input should be a number, not text"),
        (metric_as_text, "ValidationError: WorkflowOutput.metrics.m='0.5': Input should be a number"),
        (silent, "the workflow made no call to `model`, so there is nothing to train on"),
        (leaving, "SystemExit: 3"),
        (cancelling, "CancelledError: the workflow or the judge cancelled itself"),
    ],
)
async def test_an_error_of_the_workflow_is_a_failure(workflow, message):
    trajectory = await run(workflow)
    assert trajectory.reward is None
    assert trajectory.failure.where == "workflow"
    assert trajectory.failure.message.startswith(message)
    assert len(trajectory.turns) == (workflow is not silent)


AWAIT = "; a call that returns a coroutine was not awaited: write `await` before it"
PLAIN = (
    "; a plain function got a coroutine from an async client: define it with `async def` and await the call, or use "
    "model.as_sync_openai_client()"
)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
async def test_a_forgotten_await_is_named():
    async def uses(task, model):
        return model([{"role": "user", "content": "hi"}]).choices

    async def returns(task, model):
        return call_model(model)

    def plain(task, model):
        return model.client.chat.completions.create(model="m", messages=[]).choices

    def plainly_returns(task, model):
        return call_model(model)

    missing = "AttributeError: 'coroutine' object has no attribute 'choices'"
    wrong = "the workflow must return a WorkflowOutput, got coroutine"
    for workflow, message in (
        (uses, missing + AWAIT),
        (returns, wrong + AWAIT),
        (plain, missing + PLAIN),
        (plainly_returns, wrong + PLAIN),
    ):
        failure = (await run(workflow)).failure
        assert failure.message == message
        assert failure.line.endswith(f"in {workflow.__name__}")
    gc.collect()  # the coroutines that were not awaited warn here


async def judge_raises(task, response):
    raise ValueError("no answer")


async def judge_is_undecided(task, response):
    return JudgeOutput(reward=None)


async def judge_is_infinite(task, response):
    return JudgeOutput(reward=math.inf)


async def judge_returns_number(task, response):
    return 1.0


async def judge_writes_text(task, response):
    return JudgeOutput(reward="0.5")


async def test_a_workflow_with_a_client_of_its_own_is_told_of_the_clients_of_the_rollout(monkeypatch):
    for variable in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(variable, raising=False)

    async def own_client(task, model):
        return WorkflowOutput(response=await call_model(openai.AsyncOpenAI()))

    async def own_judge(task, response):
        return JudgeOutput(reward=openai.AsyncOpenAI())

    advice = "; call `model`, or give your agent the client `model.client`, which is bound to this rollout: "
    message = (await run(own_client)).failure.message
    assert message.startswith("OpenAIError: Missing credentials") and advice in message
    message = (await run(answer, own_judge)).failure.message  # a judge may have a client and a key of its own
    assert message.startswith("OpenAIError: Missing credentials") and advice not in message
    silence = (await run(silent)).failure.message
    assert silence.startswith(f"the workflow made no call to `model`, so there is nothing to train on: {advice[2:]}")


async def test_a_reply_of_agentscope_read_as_that_of_openai_names_the_knob():
    async def read_choices(task, model):
        return WorkflowOutput(response={"content": []}["choices"])

    message = (await run(read_choices)).failure.message
    assert message.startswith("KeyError: 'choices'") and "with rollout.chat_model=openai" in message
    assert "fields of the task" not in message


async def test_scalars_of_numpy_and_torch_are_rewards():
    for reward in (numpy.float32(0.5), torch.tensor(0.5), 0.5):
        assert JudgeOutput(reward=reward).reward == 0.5
    assert JudgeOutput(reward=numpy.bool_(True)).reward == JudgeOutput(reward=True).reward == 1.0


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (judge_raises, "ValueError: no answer"),
        (judge_is_undecided, "the judge returned no reward: JudgeOutput.reward is None"),
        (judge_is_infinite, "the judge returned reward inf; it must be a finite number"),
        (
            judge_returns_number,
            "the judge must return a JudgeOutput, got float: write `return JudgeOutput(reward=...)`",
        ),
        (
            judge_writes_text,
            "ValidationError: JudgeOutput.reward='0.5': Input should be a number, "  # noqa: ISC004
            "not text: convert it with float()",
        ),
    ],
)
async def test_an_error_of_the_judge_is_a_failure(judge, message):
    trajectory = await run(answer, judge)
    assert (trajectory.reward, trajectory.failure) == (None, Failure(where="judge", message=message))


async def test_a_failure_has_the_traceback_of_the_users_code():
    raised = (await run(answer, judge_raises)).failure.traceback
    assert raised.startswith("Traceback (most recent call last):")
    assert raised.rstrip().endswith("ValueError: no answer")
    assert "in judge_raises" in raised and "tunesmith/rollout" not in raised
    assert (await run(answer, judge_is_undecided)).failure.traceback is None


async def test_a_rollout_past_its_timeout_is_cancelled(passing_time):
    cleaned = []

    async def workflow(task, model):
        await call_model(model)
        passing_time.skip_soon(60)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    trajectory = await run(workflow, timeout_s=50)
    assert trajectory.failure == Failure(where="timeout", message="not done after timeout_s=50")
    assert cleaned
    assert len(trajectory.turns) == 1


async def test_workflow_and_judge_share_the_deadline(passing_time):
    async def workflow(task, model):
        output = await answer(task, model)
        passing_time.skip_soon(30)
        await asyncio.sleep(0)
        return output

    async def judge(task, response):
        passing_time.skip_soon(30)
        await asyncio.sleep(60)

    trajectory = await run(workflow, judge, timeout_s=50)
    assert trajectory.failure.where == "timeout" and len(trajectory.turns) == 1


async def test_user_code_that_ignores_its_cancellation_is_abandoned(caplog, passing_time):
    late, is_abandoned = [], asyncio.Event()

    async def workflow(task, model):
        passing_time.skip_soon(60)
        while not is_abandoned.is_set():
            try:
                await is_abandoned.wait()
            except asyncio.CancelledError:
                late.append("cancelled")
        try:
            await call_model(model)
        except openai.AuthenticationError:
            late.append("refused")
        raise RuntimeError("ignored after cancellation")

    service = build_service()
    trajectory = await run(workflow, service=service, timeout_s=50)
    assert trajectory.failure.where == "timeout"
    assert "abandoned" in caplog.text
    is_abandoned.set()
    await until(lambda: len(late) == 2)
    assert late == ["cancelled", "refused"]
    assert service.recorder.engine.ledger == []


@pytest.mark.parametrize("is_swallowed", [True, False])
async def test_an_engine_error_is_never_a_reward(is_swallowed):
    def fail(prompt, sampling, order):
        yield 40
        raise RuntimeError("out of memory")

    async def workflow(task, model):
        try:
            await call_model(model)
        except openai.InternalServerError:
            if not is_swallowed:
                raise
        return WorkflowOutput(reward=0.0)

    trajectory = await run(workflow, service=build_service(fail))
    assert trajectory.failure == Failure(where="engine", message="model: RuntimeError: out of memory")
    assert trajectory.reward is None
    assert trajectory.turns[0].sampled_ids == (40,)


class CustomBaseException(BaseException):
    pass


async def raise_in_helper(task, model):
    await call_model(model)
    raise_custom()


def raise_custom():
    raise CustomBaseException("of my own")


async def return_a_wrong_reward(task, model):
    await call_model(model)
    return WorkflowOutput(reward="much", metrics={"m": "more"})


async def test_a_user_defined_base_exception_is_a_failure_with_its_line():
    failure = (await run(raise_in_helper)).failure
    assert failure.message == "CustomBaseException: of my own"
    assert re.fullmatch(r".*test_runner_failures\.py:\d+ in raise_custom", failure.line)


async def test_failures_without_a_user_exception_name_the_function_definition():
    first = no_reward.__code__.co_firstlineno
    assert (await run(no_reward)).failure.line.endswith(f"test_runner_failures.py:{first} in no_reward")
    assert (await run(grouped)).failure.line.endswith("in raising")


async def test_all_errors_of_a_validation_are_reported():
    failure = (await run(return_a_wrong_reward)).failure
    assert failure.message.startswith("ValidationError: WorkflowOutput.reward='much': Input should be")
    assert "; WorkflowOutput.metrics.m='more': Input should be" in failure.message
    assert failure.line.endswith("in return_a_wrong_reward")


async def test_a_timeout_names_the_line_that_waited(passing_time):
    async def wait_inside():
        passing_time.skip_soon(60)
        await asyncio.sleep(60)

    async def workflow(task, model):
        await call_model(model)
        await wait_inside()

    assert (await run(workflow, timeout_s=50)).failure.line.endswith("in wait_inside")


async def test_late_calls_are_refused_and_counted():
    outcomes = []
    service = build_service()

    async def call_late(model):
        await asyncio.sleep(0.01)
        with pytest.raises(openai.AuthenticationError):
            await call_model(model)
        outcomes.append("refused")

    async def workflow(task, model):
        output = await answer(task, model)
        late.append(asyncio.ensure_future(call_late(model)))
        return output

    async def judge(task, response):
        await late[0]
        return JudgeOutput(reward=1.0)

    late = []
    trajectory = await run(workflow, judge, service=service)
    assert (trajectory.reward, len(trajectory.turns), outcomes) == (1.0, 1, ["refused"])
    bound = service.open(seed=0)
    bound.close()
    with pytest.raises(openai.AuthenticationError):
        await call_model(bound.model)
    assert service.recorder.compute_stats()["rollout/num_late_calls"] == 2
    assert len(service.recorder.engine.requests) == 1


async def test_blocking_the_event_loop_past_the_timeout_is_a_timeout(passing_time):
    async def block_once(task, model):
        output = await answer(task, model)
        passing_time.skip(60)
        return output

    failure = (await run(block_once, timeout_s=50)).failure
    assert failure.where == "timeout"
    message = r"blocked the event loop for (\d+\.\d) s and was not done after timeout_s=50"
    assert 60 <= float(re.search(message, failure.message)[1]) < 90


async def test_code_that_blocked_before_the_time_limit_was_reached_is_not_its_cause(passing_time):
    async def workflow(task, model):
        output = await answer(task, model)
        passing_time.skip(1)
        await asyncio.sleep(0)
        passing_time.skip_soon(60)
        await asyncio.sleep(1000)
        return output

    failure = (await run(workflow, timeout_s=50)).failure
    assert (failure.where, failure.message) == ("timeout", "not done after timeout_s=50")
    assert failure.line.endswith("in workflow")


async def test_time_blocked_by_another_rollout_does_not_count(passing_time):
    is_waiting, is_over = asyncio.Event(), asyncio.Event()

    async def block_once(task, model):
        output = await answer(task, model)
        await is_waiting.wait()
        passing_time.skip(60)
        is_over.set()
        return output

    async def bystander(task, model):
        is_waiting.set()
        await is_over.wait()
        return await answer(task, model)

    watchdog = EventLoopWatchdog(logging.getLogger("test"), 60)

    def start(workflow, timeout_s):
        agent = Agent(workflow=workflow, timeout_s=timeout_s)
        return run_trajectory(
            TASK, 0, agent=agent, model=build_service(), auxiliary_models={}, seed=1, watchdog=watchdog
        )

    blocked, other = await asyncio.gather(start(block_once, 50), start(bystander, 50))
    assert blocked.failure.where == "timeout"
    assert other.reward == 0.5


async def test_an_error_whose_message_raises_fails_its_rollout_alone():
    class BrokenError(Exception):
        def __str__(self):
            return self.reason

    async def broken(task, model):
        await call_model(model)
        raise BrokenError

    found = await run(broken)
    assert found.reward is None
    assert found.failure.message == "BrokenError: (its message cannot be read: AttributeError)"
