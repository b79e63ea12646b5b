"""Timeouts that a client sets hold in process too; the tokens sampled until then are a cancelled turn."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from served import DEFAULTS, QWEN25, TOKENIZERS, USER

from conditions import SkippableTime
from fakes import FakeEngine, say
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.service import ModelService

pytestmark = pytest.mark.anyio


class StuckEngine(FakeEngine):
    """Samples two tokens for each of the first calls, and then nothing, while time passes."""

    num_stuck = 1
    passing_time: SkippableTime

    async def generate(self, prompt_ids, sampling, *, order=(), on_tokens=None):
        if self.num_stuck:
            self.num_stuck -= 1
            on_tokens([30, 31], [-1.0, -2.0])
            while True:
                await asyncio.sleep(0.01)  # until the client waits for more
                self.passing_time.skip(60)
        return await super().generate(prompt_ids, sampling, order=order, on_tokens=on_tokens)


@pytest.fixture
def service(passing_time) -> ModelService:
    engine = StuckEngine(TOKENIZERS[QWEN25], say(TOKENIZERS[QWEN25], "fine"))
    engine.passing_time = passing_time
    return ModelService(engine, Renderer(TOKENIZERS[QWEN25]), model_name="m", sampling=DEFAULTS)


async def ask(model):
    return await model.client.chat.completions.create(model="m", messages=USER, timeout=50)


async def ask_stream(model):
    stream = await model.client.chat.completions.create(model="m", messages=USER, stream=True, timeout=50)
    return [chunk async for chunk in stream]


async def ask_in_thread(model):
    client = model.as_sync_openai_client()
    return await asyncio.to_thread(client.chat.completions.create, model="m", messages=USER, timeout=50)


@pytest.mark.parametrize("call", [ask, ask_stream, ask_in_thread])
async def test_a_call_ends_at_its_timeout(call, service):
    bound = service.open(seed=1)
    with pytest.raises((openai.APITimeoutError, httpx.ReadTimeout)):
        await call(bound.model)
    (turn,) = bound.close()
    assert (turn.sampled_ids, turn.stop_reason) == ((30, 31), "cancelled")


async def test_a_call_of_the_anthropic_client_ends_at_its_timeout(service):
    anthropic = pytest.importorskip("anthropic", reason="the Anthropic SDK is not installed: pip install anthropic")
    bound = service.open(seed=1)
    client = bound.model.as_anthropic_client()
    with pytest.raises(anthropic.APITimeoutError):
        await client.messages.create(model="m", max_tokens=9, messages=USER, timeout=50)
    assert [turn.stop_reason for turn in bound.close()] == ["cancelled"]


async def test_a_client_retries_after_its_timeout(service):
    bound = service.open(seed=1)
    client = bound.model.client.with_options(timeout=50, max_retries=1)
    completion = await client.chat.completions.create(model="m", messages=USER)
    assert completion.choices[0].message.content == "fine"
    assert [turn.stop_reason for turn in bound.close()] == ["cancelled", "eos"]
    assert service.recorder.compute_stats()["rollout/num_repeats"] == 1


async def test_a_call_without_a_timeout_waits(service):
    bound = service.open(seed=1)
    assert bound.model.client.timeout is None
    assert bound.model.client._client.timeout.read is None  # what other clients on the same transport take
    bound.close()
