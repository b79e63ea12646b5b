"""A session that ends while a call waits for the engine: the call is refused, its caller's task goes on."""

from __future__ import annotations

import asyncio

import pytest

from fakes import FakeEngine, build_chat_tokenizer
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.recording.recorder import Recorder, Session, SessionClosedError
from tunesmith.types import Sampling

pytestmark = pytest.mark.anyio
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"


def open_session() -> Session:
    tokenizer = build_chat_tokenizer(TEMPLATE)
    engine = FakeEngine(tokenizer, lambda prompt_ids, sampling, order: [5] * 100_000)
    recorder = Recorder(engine, Renderer(tokenizer))
    return recorder.open_session(seed=0, sampling=Sampling(max_tokens=100_000))


async def call(session: Session) -> None:
    admitted = await session.admit_text((7, 8), adds_special_tokens=False)
    await session.generate(admitted, 0, session.sampling)


async def test_the_callers_task_is_not_cancelled():
    session, seen = open_session(), []

    async def act() -> int:
        with pytest.raises(SessionClosedError):
            await call(session)
        task = asyncio.current_task()
        assert task is not None
        seen.append(task.cancelling())
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
        return 1

    task = asyncio.ensure_future(act())
    await asyncio.sleep(0.02)
    turns = session.close()
    assert await task == 1
    assert seen == [0]
    assert [turn.stop_reason for turn in turns] == ["cancelled"]
    assert len(turns[0].sampled_ids) > 0


async def test_a_task_that_is_cancelled_as_well_stays_cancelled():
    session = open_session()
    task = asyncio.ensure_future(call(session))
    await asyncio.sleep(0.02)
    session.end()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_of_the_caller_is_a_timeout():
    session = open_session()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await call(session)
    assert [turn.stop_reason for turn in session.close()] == ["cancelled"]
