"""Workflows that are plain functions: they run in a thread, and their calls are recorded as those of coroutines."""

from __future__ import annotations

import asyncio
import functools
import threading

import openai
import pytest
from single_run import answer, build_service, run

from tunesmith import WorkflowOutput
from tunesmith.config import RolloutSection
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.rollout.signature import check_workflow_function
from tunesmith.rollout.user_code import BlockingCallError, call_on_loop

pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "hi"}]


def ask(client, model, **fields) -> str:
    return client.chat.completions.create(model=model.model_name, messages=USER, **fields).choices[0].message.content


def plain(task, model):
    return WorkflowOutput(reward=0.5, response=ask(model.as_sync_openai_client(), model), metrics={"a": 1.0, "b": 2.0})


def streaming(task, model):
    chunks = model.as_sync_openai_client().chat.completions.create(
        model=model.model_name, messages=USER, stream=True, stream_options={"include_usage": True}
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    return WorkflowOutput(reward=0.5, response=text, metrics={"a": 1.0, "b": 2.0})


class Callable:
    def __call__(self, task, model):
        return plain(task, model)


@pytest.mark.parametrize("workflow", [plain, streaming, Callable(), functools.partial(plain)])
async def test_a_plain_function_is_recorded_as_a_coroutine_is(workflow):
    check_workflow_function(workflow, allows_sync=True)
    expected, trajectory = await run(answer), await run(workflow)
    assert trajectory.failure is None
    assert (trajectory.reward, trajectory.response_text) == (expected.reward, expected.response_text)
    assert trajectory.turns == expected.turns


async def test_responses_and_conversations_work_from_a_thread():
    def workflow(task, model):
        client = model.as_sync_openai_client()
        with client:
            first = client.responses.create(model="m", input="hi")
            second = client.responses.create(model="m", input="more", previous_response_id=first.id)
        return WorkflowOutput(reward=1.0, response=second.output_text)

    trajectory = await run(workflow)
    first, second = trajectory.turns
    assert second.prompt_ids[: len(first.prompt_ids + first.sampled_ids)] == first.prompt_ids + first.sampled_ids


async def test_a_plain_function_may_use_a_socket():
    service = build_service()

    def workflow(task, model):
        with openai.OpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            return WorkflowOutput(reward=1.0, response=ask(client, model))

    async with service.serve():
        trajectory = await run(workflow, service=service)
    assert trajectory.failure is None
    assert len(trajectory.turns) == 1


async def test_errors_of_a_plain_function_name_its_line():
    def workflow(task, model):
        ask(model.as_sync_openai_client(), model)
        raise KeyError("missing")

    def stops(task, model):
        raise StopIteration

    def wrong(task, model):
        ask(model.as_sync_openai_client(), model)
        return 3

    failure = (await run(workflow)).failure
    assert (failure.where, "KeyError" in failure.message, "in workflow" in failure.line) == ("workflow", True, True)
    assert "StopIteration" in (await run(stops)).failure.message
    assert "must return a WorkflowOutput, got int" in (await run(wrong)).failure.message


async def test_a_plain_function_past_its_timeout_is_abandoned_and_cannot_sample(passing_time):
    released, refused, loop = threading.Event(), threading.Event(), asyncio.get_running_loop()

    def workflow(task, model):
        client = model.as_sync_openai_client()
        ask(client, model)
        loop.call_soon_threadsafe(passing_time.skip, 60)
        released.wait(60)
        try:
            ask(client, model)
        except openai.AuthenticationError:
            refused.set()
            raise

    service = build_service()
    trajectory = await run(workflow, service=service, timeout_s=50)
    assert trajectory.failure.where == "timeout"
    assert "in workflow" in trajectory.failure.line
    assert len(trajectory.turns) == 1
    released.set()
    assert await asyncio.to_thread(refused.wait, 60)


async def test_a_synchronous_call_on_the_event_loop_is_refused():
    async def workflow(task, model):
        return ask(model.as_sync_openai_client(), model)

    failure = (await run(workflow)).failure
    assert "would block" in failure.message
    with pytest.raises(BlockingCallError, match="would block it: use the async client"):
        call_on_loop(asyncio.get_running_loop(), lambda: asyncio.sleep(0))


def test_many_plain_functions_run_on_the_engine_loop():
    seen = set()

    def workflow(task, model):
        seen.add(threading.current_thread().name)
        return plain(task, model)

    async def run_all():
        service = build_service()
        return await asyncio.gather(*(run(workflow, service=service) for _ in range(8)))

    trajectories = run_lockstep(run_all(), RolloutSection())
    assert [trajectory.response_text for trajectory in trajectories] == ["fine"] * 8
    assert seen == {"tunesmith-workflow"}


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_generators_are_refused(kind):
    def generator(task, model):
        yield

    async def async_generator(task, model):
        yield

    with pytest.raises(ValueError, match="must be async"):
        check_workflow_function(generator if kind == "generator" else async_generator, allows_sync=True)
