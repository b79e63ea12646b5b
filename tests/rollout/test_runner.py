"""A rollout ends with a reward: what functions receive, how runs are isolated, what is recorded."""

from __future__ import annotations

import asyncio
import logging
import time

import openai
import pytest
import torch
from single_run import TASK, answer, build_service, call_model, run

from chat_templates import GEMMA2
from fakes import FakeEngine, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.runner import describe_response
from tunesmith.rollout.service import ExternalModel, ModelService
from tunesmith.types import Failure, JudgeOutput, Sampling, WorkflowOutput

pytestmark = pytest.mark.anyio


async def test_without_a_judge_the_workflows_reward_is_used():
    trajectory = await run(answer)
    assert (trajectory.reward, trajectory.failure, trajectory.run_index) == (0.5, None, 3)
    assert trajectory.metrics == {"a": 1.0, "b": 2.0}
    assert trajectory.response_text == "fine"
    assert [turn.stop_reason for turn in trajectory.turns] == ["eos"]


async def test_the_judges_reward_and_metrics_override_the_workflows():
    async def judge(task, response):
        assert task == TASK.row
        return JudgeOutput(reward=float(response == "fine"), metrics={"b": 3.0})

    trajectory = await run(answer, judge)
    assert trajectory.reward == 1.0
    assert trajectory.metrics == {"a": 1.0, "b": 3.0}


async def test_functions_receive_the_parameters_in_their_signature():
    seen = {}

    async def workflow(task, model, auxiliary_models, logger):
        seen["workflow"] = (auxiliary_models, logger)
        return await answer(task, model)

    async def judge(task, response, logger=None, auxiliary_models=None):
        seen["judge"] = (auxiliary_models, logger)
        return JudgeOutput(reward=1.0)

    await run(workflow, judge, auxiliary_models={"auxiliary": ExternalModel("it")})
    assert seen["workflow"] == seen["judge"]
    assert seen["workflow"][0] == {"auxiliary": "it"}
    assert isinstance(seen["workflow"][1], logging.Logger)


async def test_each_function_receives_its_own_copy_of_the_row():
    async def workflow(task, model):
        task["tags"].append("b")
        task["new"] = 1
        return await answer(task, model)

    async def judge(task, response):
        return JudgeOutput(reward=float(task == {"question": "q", "tags": ["a"]}))

    assert (await run(workflow, judge)).reward == 1.0


async def test_local_auxiliary_models_are_seeded_and_not_recorded():
    auxiliary = build_service(is_recorded=False)

    async def workflow(task, model, auxiliary_models):
        await call_model(auxiliary_models["auxiliary"])
        return await answer(task, model)

    trajectory = await run(workflow, auxiliary_models={"auxiliary": auxiliary})
    assert len(trajectory.turns) == 1
    await run(workflow, auxiliary_models={"auxiliary": auxiliary})
    first, second = (sampling.seed for _, sampling, _ in auxiliary.recorder.engine.requests)
    assert first == second


async def test_an_engine_error_of_an_auxiliary_model_names_the_model():
    def fail(prompt, sampling, order):
        raise RuntimeError("lost")

    async def judge(task, response, auxiliary_models):
        try:
            await call_model(auxiliary_models["critic"])
        except openai.InternalServerError:
            return JudgeOutput(reward=0.0)

    trajectory = await run(answer, judge, auxiliary_models={"critic": build_service(fail, is_recorded=False)})
    assert trajectory.failure == Failure(where="engine", message="critic: RuntimeError: lost")


async def test_cancelling_the_runner_closes_the_session():
    service = build_service(lambda *_: [30] * 10_000)
    running = asyncio.ensure_future(run(answer, service=service))
    while not service.recorder.engine.ledger:  # noqa: ASYNC110 - the fake engine has no event to wait for
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert service.recorder._sessions == {}


async def test_calls_in_flight_are_cancelled_when_the_workflow_returns():
    pending, begun = [], asyncio.Event()

    def script(prompt, sampling, order):
        yield from range(20, 30)
        begun.set()
        yield from range(30, 60)

    async def workflow(task, model):
        pending.append(asyncio.ensure_future(call_model(model)))
        await begun.wait()
        return WorkflowOutput(reward=1.0)

    service = build_service(script)
    (turn,) = (await run(workflow, service=service)).turns
    with pytest.raises(openai.AuthenticationError):
        await pending[0]
    assert turn.stop_reason == "cancelled"
    assert 10 <= len(turn.sampled_ids) < 40
    assert list(turn.sampled_ids) == service.recorder.engine.ledger[0][1]


async def test_a_rollout_whose_calls_were_all_refused_fails():
    async def workflow(task, model):
        with pytest.raises(openai.BadRequestError):
            await model([{"role": "assistant", "content": "x", "tool_calls": 3}])
        with pytest.raises(openai.BadRequestError):
            await model([{"role": "user", "content": "x"}, {"role": "robot"}])
        return WorkflowOutput(reward=0.0)

    async def workflow_of_a_strict_template(task, model):
        with pytest.raises(openai.BadRequestError):
            await model([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}])
        return WorkflowOutput(reward=0.0)

    assert (await run(workflow)).failure.message.startswith("the workflow made no call to `model`")
    strict = build_chat_tokenizer(GEMMA2)
    engine = FakeEngine(strict, say(strict, "x"))
    service = ModelService(engine, Renderer(strict), model_name="m", sampling=Sampling(max_tokens=50))
    failure = (await run(workflow_of_a_strict_template, service=service)).failure
    assert failure.message == "none of the workflow's 1 calls to `model` returned a completion"


class MessageWithText:
    def get_text_content(self):
        return "text"


class Broken:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("a", "a"),
        (None, ""),
        (MessageWithText(), "text"),
        ({"x": 1}, "{'x': 1}"),
        ("y" * 9000, "y" * 9000),
        (Broken(), "<test_runner.Broken>"),
    ],
)
def test_responses_are_described_as_text(response, text):
    assert describe_response(response) == text


def test_long_values_are_shortened():
    assert len(describe_response(list(range(100_000)))) < 5000


async def test_duration_is_measured():
    started = time.perf_counter()
    trajectory = await run(answer)
    assert 0 < trajectory.duration_s <= time.perf_counter() - started


async def test_torch_modes_are_isolated_between_runs():
    """Two rollouts await inside torch context managers and leave them in another order than they entered."""
    first_is_in, second_is_in, first_is_out = asyncio.Event(), asyncio.Event(), asyncio.Event()
    seen = []

    async def first(task, model):
        with torch.no_grad():
            first_is_in.set()
            await second_is_in.wait()
        first_is_out.set()
        seen.append(("first", torch.is_grad_enabled()))
        return await answer(task, model)

    async def second(task, model):
        await first_is_in.wait()
        seen.append(("second", torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            second_is_in.set()
            await first_is_out.wait()
            seen.append(("within", torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        await asyncio.sleep(0)
        seen.append(("after", torch.is_grad_enabled(), torch.get_default_dtype()))
        return await answer(task, model)

    await asyncio.gather(run(first), run(second))
    assert seen == [
        ("second", True, False), ("first", True), ("within", True, True), ("after", False, torch.float64),
    ]  # fmt: skip
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert torch.get_default_dtype() == torch.float32 and not torch.is_autocast_enabled("cpu")


async def test_an_unclosed_inference_mode_does_not_leak():
    guards = []

    async def workflow(task, model):
        guards.append(torch.inference_mode())
        guards[-1].__enter__()
        return await answer(task, model)

    assert (await run(workflow)).reward == 0.5
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
