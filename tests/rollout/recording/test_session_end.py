"""A session that ends while a call waits for the engine: the call is refused, its caller's task goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from conditions import SkippableTime, until
from fakes import FakeEngine, build_chat_tokenizer
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.recording.recorder import Recorder, Session, SessionClosedError
from tunesmith.types import Sampling

pytestmark = pytest.mark.anyio
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"


def open_session(sampled: list[int]) -> Session:
    """`sampled` receives the tokens of its calls."""

    def sample(*arguments: object) -> Iterator[int]:
        while True:
            sampled.append(5)
            yield 5

    tokenizer = build_chat_tokenizer(TEMPLATE)
    engine = FakeEngine(tokenizer, sample)
    recorder = Recorder(engine, Renderer(tokenizer))
    return recorder.open_session(seed=0, sampling=Sampling(max_tokens=1_000_000))


async def call(session: Session) -> None:
    admitted = await session.admit_text((7, 8), adds_special_tokens=False)
    await session.generate(admitted, 0, session.sampling)


async def test_the_callers_task_is_not_cancelled():
    session, seen = open_session(sampled := []), []

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
    await until(lambda: len(sampled) > 1)  # the first has reached the session
    turns = session.close()
    assert await task == 1
    assert seen == [0]
    assert [turn.stop_reason for turn in turns] == ["cancelled"]
    assert len(turns[0].sampled_ids) > 0


async def test_a_task_that_is_cancelled_as_well_stays_cancelled():
    session = open_session(sampled := [])
    task = asyncio.ensure_future(call(session))
    await until(lambda: sampled)
    session.end()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_timeout_of_the_caller_is_a_timeout(passing_time: SkippableTime):
    session = open_session(sampled := [])

    async def skip_time() -> None:
        await until(lambda: sampled)
        passing_time.skip(60)

    skipping = asyncio.create_task(skip_time())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(50):
            await call(session)
    await skipping
    assert [turn.stop_reason for turn in session.close()] == ["cancelled"]
