"""Streams, client disconnects, and the endpoint over HTTP."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from served import ADD, SUB, TOKENIZERS, TOOLS, USER, build_service, create_completion, get_engine

from chat_templates import QWEN25, THINKING
from fakes import Script
from tunesmith.rollout.openai_server.app import run_while_connected
from tunesmith.rollout.service import ModelService

pytestmark = pytest.mark.anyio


def join_chunks(chunks) -> dict:
    """The message that a client assembles from the chunks of one choice."""
    content, reasoning, calls, logprobs, finish = "", "", [], [], None
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                assert call.index == len(calls)
                calls.append((call.id, call.function.name, call.function.arguments))
            logprobs += choice.logprobs.content if choice.logprobs else []
            finish = choice.finish_reason or finish
    return {
        "content": content, "reasoning": reasoning, "calls": calls, "finish": finish,
        "logprobs": [(token.token, token.logprob) for token in logprobs],
    }  # fmt: skip


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    ADD,
    SUB,
    "{",
    " ",
    "\n",
    "STOP",
    "ST",
    "a",
    "\u00e9",
    "\U0001f600",
]


@pytest.mark.parametrize("seed", range(60))
async def test_stream_chunks_concatenate_to_the_message(seed):
    rng = random.Random(seed)
    tokenizer = TOKENIZERS[QWEN25]
    text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
    ids = [i for i in tokenizer.encode(text, add_special_tokens=False) if rng.random() > 0.03]
    if rng.random() < 0.7:
        ids.append(tokenizer.eos_token_id)
    service = build_service(script=lambda *_: ids or [tokenizer.eos_token_id], template=rng.choice([QWEN25, THINKING]))
    fields = {"tools": TOOLS, "logprobs": True, "parallel_tool_calls": rng.random() < 0.5}
    fields["stop"] = rng.choice([["STOP"], ["\n\n", "a\u00e9"], []])
    whole, (turn,) = await create_completion(service, **fields)
    chunks, (streamed_turn,) = await create_completion(
        service, stream=True, stream_options={"include_usage": True}, **fields
    )
    choice = whole.choices[0]
    assert join_chunks(chunks) == {
        "content": choice.message.content or "",
        "reasoning": getattr(choice.message, "reasoning_content", "") or "",
        "calls": [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []],
        "finish": choice.finish_reason,
        "logprobs": [(token.token, token.logprob) for token in choice.logprobs.content],
    }
    assert streamed_turn == turn
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_a_stream_has_no_usage_unless_requested():
    chunks, _ = await create_completion(build_service("x"), stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_text_is_streamed_while_it_is_sampled():
    service = build_service("abc def")
    num_tokens = len(TOKENIZERS[QWEN25].encode("abc def"))
    bound = service.open(seed=1)
    stream = await bound.model.client.chat.completions.create(model="m", messages=USER, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            assert len(get_engine(service).ledger[0][1]) < num_tokens
            break
    await stream.close()
    bound.close()


async def test_streams_of_several_choices_interleave():
    def script(prompt, sampling, order):
        return TOKENIZERS[QWEN25].encode("ab" if order[-1] else "cdef")

    chunks, _ = await create_completion(build_service(script=script), stream=True, n=2, max_tokens=2)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["cd", "ab"]


@asynccontextmanager
async def connect(service: ModelService, transport: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """An HTTP client for the service, in process or over a socket."""
    if transport == "in process":
        yield service._http_client, service.base_url
    else:
        async with service.serve() as url, httpx.AsyncClient() as client:
            yield client, url


def sample_until_cancelled() -> tuple[Script, asyncio.Event, asyncio.Event]:
    """A script that samples until it is cancelled, with events for its start and its end."""
    begun, stopped = asyncio.Event(), asyncio.Event()

    def script(prompt, sampling, order):
        try:
            for count, token_id in enumerate(range(20, 390)):
                if count == 3:
                    begun.set()
                yield token_id
        finally:
            stopped.set()

    return script, begun, stopped


@pytest.mark.parametrize("transport", ["in process", "http"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_disconnect_cancels_its_request(transport, stream):
    script, begun, stopped = sample_until_cancelled()
    service = build_service(script=script)
    bound = service.open(seed=1)
    async with connect(service, transport) as (http_client, url):
        client = openai.AsyncOpenAI(
            base_url=url, api_key=bound.session.key, http_client=http_client, max_retries=0, timeout=None
        )
        request = asyncio.ensure_future(client.chat.completions.create(model="m", messages=USER, stream=stream))
        await begun.wait()
        if stream:
            await (await request).close()
        else:
            request.cancel()
        await stopped.wait()
    ((_, sampled_ids),) = get_engine(service).ledger
    (turn,) = bound.close()
    assert turn.stop_reason == "cancelled"
    assert turn.sampled_ids == tuple(sampled_ids)
    assert 3 <= len(sampled_ids) < 370


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_a_session_cancels_calls_in_flight(stream):
    script, begun, stopped = sample_until_cancelled()
    service = build_service(script=script)
    bound = service.open(seed=1)

    async def consume():
        answer = await bound.model.client.chat.completions.create(model="m", messages=USER, stream=stream)
        return [chunk async for chunk in answer]

    request = asyncio.ensure_future(consume())
    await begun.wait()
    (turn,) = bound.close()
    assert turn.stop_reason == "cancelled"
    with pytest.raises(openai.APIError, match=r"no open trajectory|SessionClosed"):
        await request
    assert stopped.is_set()
    assert turn.sampled_ids == tuple(get_engine(service).ledger[0][1])


async def test_completions_over_http():
    service = build_service(f"both {ADD}")
    async with service.serve() as url:
        bound = service.open(seed=1)
        assert bound.model.base_url == url
        async with openai.AsyncOpenAI(base_url=url, api_key=bound.session.key, max_retries=0) as client:
            completion = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
            assert completion.choices[0].message.tool_calls[0].function.name == "add"
            stream = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS, stream=True)
            assert join_chunks([chunk async for chunk in stream])["content"] == "both"
        assert len(bound.close()) == 2


@pytest.mark.parametrize(("waits", "expected"), [(False, "answer"), (True, None)])
async def test_a_client_that_is_gone_before_the_response_begins_cancels_only_what_waits(waits, expected):
    async def receive():
        return {"type": "http.disconnect"}

    async def respond():
        if waits:
            await asyncio.Event().wait()
        return "answer"

    assert await run_while_connected(receive, respond()) == expected
    await asyncio.sleep(0)  # raises a cancellation that came too late
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
