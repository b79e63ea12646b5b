"""The endpoint as clients see it, in process and over HTTP."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from chat_templates import CHATML, QWEN25, THINKING
from fakes import FakeEngine, Script, build_chat_tokenizer, say
from tunesmith.model.render import Renderer
from tunesmith.rollout.client import build_client
from tunesmith.rollout.service import ModelService
from tunesmith.types import Distribution, Sampling

pytestmark = pytest.mark.anyio

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("add", "sub")
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SUB = '<tool_call>\n{"name": "sub", "arguments": {"b": "\u00e9"}}\n</tool_call>'
USER = [{"role": "user", "content": "hi"}]
DEFAULTS = Sampling(distribution=Distribution(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1), max_tokens=300)

TOKENIZERS = {template: build_chat_tokenizer(template) for template in (CHATML, QWEN25, THINKING)}


def build_service(*replies: str, script: Script | None = None, template: str = QWEN25, **options) -> ModelService:
    tokenizer = TOKENIZERS[template]
    engine = FakeEngine(tokenizer, script or say(tokenizer, *replies), **options)
    return ModelService(engine, Renderer(tokenizer), model_name="m", sampling=DEFAULTS)


def engine_of(service: ModelService) -> FakeEngine:
    return service.recorder.engine


async def ask(service: ModelService, messages=USER, **fields):
    """One call in a session of its own; the completion and the recorded turns."""
    lease = service.open(seed=1)
    try:
        completion = await lease.model.client.chat.completions.create(model="m", messages=messages, **fields)
        if fields.get("stream"):
            completion = [chunk async for chunk in completion]
    finally:
        turns = service.close(lease)
    return completion, turns


async def test_a_call_is_answered_and_recorded():
    service = build_service("fine")
    completion, (turn,) = await ask(service)
    choice = completion.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "fine", "stop")
    assert choice.message.tool_calls is None
    ((prompt_ids, sampled_ids),) = engine_of(service).ledger
    assert turn.prompt_ids == prompt_ids
    assert turn.sampled_ids == tuple(sampled_ids)
    assert turn.logprobs == tuple(map(FakeEngine.logprob_of, sampled_ids))
    assert turn.stop_reason == "eos"
    assert turn.distribution == DEFAULTS.distribution
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt_ids), len(sampled_ids))
    assert usage.prompt_tokens_details.cached_tokens == 0


async def test_parallel_tool_calls():
    completion, _ = await ask(build_service(f"both\n{ADD}\n{SUB}"), tools=TOOLS)
    message = completion.choices[0].message
    assert completion.choices[0].finish_reason == "tool_calls"
    assert message.content == "both"
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == [("add", {"a": 1}), ("sub", {"b": "\u00e9"})]
    assert len({call.id for call in message.tool_calls}) == 2


async def test_one_call_at_a_time_ends_sampling_with_the_call():
    service = build_service(f"one {ADD}{SUB}")
    completion, (turn,) = await ask(service, tools=TOOLS, parallel_tool_calls=False)
    assert [call.function.name for call in completion.choices[0].message.tool_calls] == ["add"]
    assert completion.choices[0].finish_reason == "tool_calls"
    assert turn.stop_reason == "stop"
    assert service.recorder.renderer.decode(turn.sampled_ids).endswith("</tool_call>")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sub"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_begins_with_tokens_that_were_not_sampled(choice, stream):
    is_named = isinstance(choice, dict)
    rest = ' {"b": 2}}\n</tool_call>' if is_named else 'add", "arguments": {"a": 1}}\n</tool_call>'
    service = build_service(f"{rest}{SUB}")
    fields = {"tools": TOOLS, "tool_choice": choice, "stop": ["\n\n"], "extra_body": {"return_token_ids": True}}
    completion, (turn,) = await ask(service, stream=stream, **fields)
    if stream:
        calls = [call for chunk in completion for call in chunk.choices[0].delta.tool_calls or []]
    else:
        calls = completion.choices[0].message.tool_calls
        assert tuple(completion.prompt_token_ids) == turn.prompt_ids
        assert tuple(completion.choices[0].token_ids) == turn.sampled_ids
    assert [call.function.name for call in calls] == (["sub"] if is_named else ["add", "sub"])
    renderer = service.recorder.renderer
    start = '<tool_call>\n{"name": "' + ('sub", "arguments":' if is_named else "")
    assert renderer.decode(turn.prompt_ids).endswith(f"assistant\n{start}")
    assert renderer.decode(turn.sampled_ids).startswith(rest)


async def test_the_only_tool_is_named_when_a_call_is_required():
    service = build_service(" {}}</tool_call>")
    completion, (turn,) = await ask(service, tools=TOOLS[:1], tool_choice="required")
    assert completion.choices[0].message.tool_calls[0].function.name == "add"
    assert service.recorder.renderer.decode(turn.prompt_ids).endswith('{"name": "add", "arguments":')


async def test_calls_stay_text_when_no_tool_may_be_called():
    completion, _ = await ask(build_service(ADD), tools=TOOLS, tool_choice="none")
    assert completion.choices[0].message.content == ADD
    assert completion.choices[0].message.tool_calls is None
    completion, _ = await ask(build_service(ADD))
    assert completion.choices[0].message.content == ADD


async def test_reasoning_is_told_apart():
    completion, _ = await ask(build_service("hm\n</think>\n\nfine", template=THINKING))
    message = completion.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "fine")


async def test_choices_are_turns_of_their_own():
    rng_script = lambda prompt, sampling, order: random.Random(sampling.seed).choices(range(20, 90), k=5)  # noqa: E731
    service = build_service(script=rng_script)
    completion, turns = await ask(service, n=3, max_tokens=5, logprobs=True)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert len({turn.sampled_ids for turn in turns}) == 3
    assert len({turn.prompt_ids for turn in turns}) == 1
    for choice, turn in zip(completion.choices, turns, strict=True):
        assert choice.message.content == service.recorder.renderer.decode(turn.sampled_ids)
        assert [token.logprob for token in choice.logprobs.content] == list(turn.logprobs)
        assert choice.finish_reason == "length"
    assert completion.usage.completion_tokens == 15
    assert [order for *_, order in engine_of(service).requests] == [(0, 0), (0, 1), (0, 2)]


async def test_requests_win_over_the_sessions_defaults():
    service = build_service("x")
    await ask(service)
    await ask(
        service,
        temperature=0,
        top_p=0.5,
        max_tokens=7,
        stop="END",
        logit_bias={"3": -1.5},
        extra_body={"top_k": -1, "min_p": 0, "stop_token_ids": [9]},
    )
    await ask(service, max_completion_tokens=8)
    (_, first, _), (_, second, _), (_, third, _) = engine_of(service).requests
    assert (first.distribution, first.max_tokens) == (DEFAULTS.distribution, 300)
    assert second.distribution == Distribution(temperature=0, top_p=0.5, logit_bias=((3, -1.5),))
    assert (second.max_tokens, second.stop, second.stop_token_ids) == (7, ("END",), (9,))
    assert third.max_tokens == 8


async def test_seeds_come_from_session_call_and_choice():
    service = build_service("x")
    seeds = []
    for session_seed in (1, 1, 2):
        lease = service.open(seed=session_seed)
        for fields in ({}, {}, {"seed": 5}, {"seed": 5}):
            await lease.model(USER, **fields)
        service.close(lease)
        seeds.append([sampling.seed for _, sampling, _ in engine_of(service).requests[-4:]])
    assert seeds[0] == seeds[1]
    assert seeds[0][2] == seeds[0][3]
    assert len({*seeds[0], *seeds[2]}) == 6


async def test_stop_strings_end_the_text():
    completion, (turn,) = await ask(build_service("say STOP here"), stop=["STOP"])
    assert completion.choices[0].message.content == "say "
    assert completion.choices[0].finish_reason == "stop"
    assert turn.stop_reason == "stop"


async def test_a_full_context_ends_the_turn_and_not_the_run():
    completion, (turn,) = await ask(build_service("x", max_model_len=3))
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("", "length")
    assert (turn.sampled_ids, turn.stop_reason) == ((), "context")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs=2 is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty=0.5"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"extra_body": {"repetition_penalty": 1.1}}, "repetition_penalty"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"reasoning_effort": "low"}, "not read by this model's chat template"),
        ({"temperature": -1}, "temperature=-1"),
        ({"top_p": 0}, "top_p=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"n": 0}, "n=0"),
        ({"stop": [""]}, "stop must be"),
        ({"seed": "x"}, "seed must be int"),
        ({"logit_bias": {"a": 1}}, "logit_bias must map"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice names 'mul'"),
        ({"tools": [{"type": "custom"}]}, r"tools\[0\]"),
        ({"messages": []}, "non-empty list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts only"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "cannot set"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(fields, said):
    service = build_service("x")
    messages = fields.pop("messages", USER)
    with pytest.raises(openai.BadRequestError, match=said) as caught:
        await ask(service, messages, **fields)
    assert caught.value.body["type"] == "invalid_request_error"
    assert engine_of(service).ledger == []


async def test_what_changes_nothing_is_ignored():
    completion, _ = await ask(
        build_service("x"), user="u", store=False, metadata={"a": "b"}, presence_penalty=0, logprobs=False,
        response_format={"type": "text"}, extra_body={"made_up": 1, "repetition_penalty": 1.0, "top_k": None},
    )  # fmt: skip
    assert completion.choices[0].message.content == "x"


async def test_another_model_is_not_found():
    service = build_service("x")
    lease = service.open(seed=1)
    with pytest.raises(openai.NotFoundError, match="serves 'm'"):
        await lease.model.client.chat.completions.create(model="gpt", messages=USER)


async def test_unknown_and_closed_keys_are_refused():
    service = build_service("x")
    lease = service.open(seed=1)
    service.close(lease)
    with pytest.raises(openai.AuthenticationError, match="no open trajectory"):
        await lease.model(USER)
    response = await service._http_client.post("http://x/v1/chat/completions", json={})
    assert response.status_code == 401
    assert "no API key" in response.json()["error"]["message"]
    assert engine_of(service).ledger == []


async def test_the_key_may_be_in_the_path():
    service = build_service("x")
    lease = service.open(seed=1)
    url = f"http://x/t/{lease.session.key}/v1"
    client = build_client(base_url=url, api_key="whatever", http_client=service._http_client)
    await client.chat.completions.create(model="m", messages=USER)
    assert [model.id for model in (await client.models.list()).data] == ["m"]
    assert len(service.close(lease)) == 1


async def test_malformed_bodies_are_refused():
    service = build_service("x")
    lease = service.open(seed=1)
    for body in (b"{", b"[]", b"\xff", b'{"messages": 3}'):
        response = await service._http_client.post(
            "http://x/v1/chat/completions", content=body, headers={"authorization": f"Bearer {lease.session.key}"}
        )
        assert response.status_code == 400, body


async def test_health_and_models():
    service = build_service("x")
    assert (await service._http_client.get("http://x/health")).json() == {"status": "ok", "policy_version": 0}
    assert (await service._http_client.get("http://x/v1/models")).json()["data"][0]["id"] == "m"


async def test_an_engine_error_is_a_500_and_is_remembered():
    def fail(prompt, sampling, order):
        yield 40
        raise RuntimeError("out of memory")

    service = build_service(script=fail)
    lease = service.open(seed=1)
    with pytest.raises(openai.InternalServerError, match="RuntimeError: out of memory"):
        await lease.model(USER)
    assert lease.session.engine_error == "RuntimeError: out of memory"
    (turn,) = service.close(lease)
    assert (turn.sampled_ids, turn.stop_reason) == ((40,), "cancelled")
    assert engine_of(service).ledger[0][1] == [40]


async def test_an_engine_error_amid_a_stream_ends_it_with_an_error():
    def fail(prompt, sampling, order):
        yield 40
        raise RuntimeError("out of memory")

    with pytest.raises(openai.APIError, match="out of memory"):
        await ask(build_service(script=fail), stream=True)


# Streams


def join_chunks(chunks) -> dict:
    """What a client makes of the chunks of one choice."""
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
async def test_a_stream_adds_up_to_the_message(seed):
    rng = random.Random(seed)
    tokenizer = TOKENIZERS[QWEN25]
    text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
    ids = [i for i in tokenizer.encode(text, add_special_tokens=False) if rng.random() > 0.03]
    if rng.random() < 0.7:
        ids.append(tokenizer.eos_token_id)
    service = build_service(script=lambda *_: ids or [tokenizer.eos_token_id], template=rng.choice([QWEN25, THINKING]))
    fields = {"tools": TOOLS, "logprobs": True, "parallel_tool_calls": rng.random() < 0.5}
    fields["stop"] = rng.choice([["STOP"], ["\n\n", "a\u00e9"], []])
    whole, (turn,) = await ask(service, **fields)
    chunks, (streamed_turn,) = await ask(service, stream=True, stream_options={"include_usage": True}, **fields)
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


async def test_a_stream_without_usage_has_none():
    chunks, _ = await ask(build_service("x"), stream=True)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_text_comes_while_it_is_sampled():
    service = build_service("abc def")
    num_tokens = len(TOKENIZERS[QWEN25].encode("abc def"))
    lease = service.open(seed=1)
    stream = await lease.model.client.chat.completions.create(model="m", messages=USER, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            assert len(engine_of(service).ledger[0][1]) < num_tokens
            break
    await stream.close()
    service.close(lease)


async def test_streams_of_several_choices_interleave():
    def script(prompt, sampling, order):
        return TOKENIZERS[QWEN25].encode("ab" if order[-1] else "cdef")

    chunks, _ = await ask(build_service(script=script), stream=True, n=2, max_tokens=2)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["cd", "ab"]


@asynccontextmanager
async def reach(service: ModelService, how: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """The service in process or over HTTP."""
    if how == "in process":
        yield service._http_client, service.base_url
    else:
        async with service.serve() as url, httpx.AsyncClient() as client:
            yield client, url


def sample_until_cancelled() -> tuple[Script, asyncio.Event, asyncio.Event]:
    """A script that samples on and on, and says when it has begun and when it was stopped."""
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


@pytest.mark.parametrize("how", ["in process", "http"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_request(how, stream):
    script, begun, stopped = sample_until_cancelled()
    service = build_service(script=script)
    lease = service.open(seed=1)
    async with reach(service, how) as (http_client, url):
        client = build_client(base_url=url, api_key=lease.session.key, http_client=http_client)
        request = asyncio.ensure_future(client.chat.completions.create(model="m", messages=USER, stream=stream))
        await begun.wait()
        if stream:
            await (await request).close()
        else:
            request.cancel()
        await stopped.wait()
    ((_, sampled_ids),) = engine_of(service).ledger
    (turn,) = service.close(lease)
    assert turn.stop_reason == "cancelled"
    assert turn.sampled_ids == tuple(sampled_ids)
    assert 3 <= len(sampled_ids) < 370


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_a_session_ends_what_is_in_flight(stream):
    script, begun, stopped = sample_until_cancelled()
    service = build_service(script=script)
    lease = service.open(seed=1)

    async def consume():
        answer = await lease.model.client.chat.completions.create(model="m", messages=USER, stream=stream)
        return [chunk async for chunk in answer]

    request = asyncio.ensure_future(consume())
    await begun.wait()
    (turn,) = service.close(lease)
    assert turn.stop_reason == "cancelled"
    with pytest.raises(openai.APIError, match=r"no open trajectory|SessionClosed"):
        await request
    assert stopped.is_set()
    assert turn.sampled_ids == tuple(engine_of(service).ledger[0][1])


async def test_over_http_the_answers_are_the_same():
    service = build_service(f"both {ADD}")
    async with service.serve() as url:
        lease = service.open(seed=1)
        assert lease.model.base_url == url
        async with build_client(base_url=url, api_key=lease.session.key) as client:
            completion = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS)
            assert completion.choices[0].message.tool_calls[0].function.name == "add"
            stream = await client.chat.completions.create(model="m", messages=USER, tools=TOOLS, stream=True)
            assert join_chunks([chunk async for chunk in stream])["content"] == "both"
        assert len(service.close(lease)) == 2
