"""The client in this process: what it hands over as it is, and what it copies."""

from __future__ import annotations

import copy

import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from served import TOOLS, USER, build_service, engine_of

from tunesmith.errors import ConfigError

pytestmark = pytest.mark.anyio


class Text(str):
    """Text of a type of its own."""


MESSAGE = {"role": "user", "content": "hi \u20ac"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "messages",
    [
        [MESSAGE, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "2"}],
        [MESSAGE, ChatCompletionMessage.model_validate({"role": "assistant", "tool_calls": [CALL]}), MESSAGE],
        [{"role": Text("user"), "content": Text("hi")}],
        [{"role": "user", "content": ({"type": "text", "text": "one"}, {"type": "text", "text": "two"})}],
        [{"role": "user", "content": "hi", "name": None, 3: 4}],
        [{"role": "user", "content": b"hi"}],
        [{"role": "user", "content": object()}],
        ["hi"],
        [],
        "hi",
    ],
)
async def test_messages_of_any_type_are_read_alike_the_short_way_and_the_long_way(messages):
    seen = []
    for is_copy in (False, True, False):
        service = build_service("fine")
        bound = service.open(seed=1)
        client = bound.model.client.copy() if is_copy else bound.model.client
        try:
            await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            seen.append([request[0] for request in engine_of(service).requests])
        except (openai.BadRequestError, TypeError) as error:
            seen.append(type(error))
        service.close(bound)
    assert seen[0] == seen[1] == seen[2]


async def test_what_a_client_changes_in_place_is_seen_and_stays_in_its_session():
    service = build_service("first", "second", "third")
    messages, tools = [{"role": "user", "content": "hi"}], copy.deepcopy(TOOLS)
    bound_models = [service.open(seed=1), service.open(seed=2)]
    create = [bound.model.client.chat.completions.create for bound in bound_models]
    await create[0](model="m", messages=messages, tools=tools)
    messages[0]["content"] = "bye"
    tools[0]["function"]["name"] = "mul"
    await create[0](model="m", messages=messages, tools=tools)
    await create[1](model="m", messages=USER, tools=TOOLS)
    prompts = [request[0] for request in engine_of(service).requests]
    texts = ["".join(service.recorder.renderer.format_token(i) for i in prompt) for prompt in prompts]
    assert ["bye" in text for text in texts] == ['"mul"' in text for text in texts] == [False, True, False]
    assert prompts[2] == prompts[0]
    assert [len(service.close(bound)) for bound in bound_models] == [2, 1]


async def test_who_closes_a_client_closes_nobody_elses():
    service = build_service("fine")
    first, second = service.open(seed=1), service.open(seed=2)
    async with first.model.client as client:
        await client.chat.completions.create(model="m", messages=USER)
    async with second.model.client.with_options(max_retries=1) as copied, second.model.client._client:
        await copied.chat.completions.create(model="m", messages=USER)
    for stream in (False, True):
        with pytest.raises(RuntimeError, match="the client has been closed"):
            await first.model.client.chat.completions.create(model="m", messages=USER, stream=stream)
        await second.model.client.chat.completions.create(model="m", messages=USER, stream=stream)
        await service.open(seed=3).model.client.copy().chat.completions.create(model="m", messages=USER)
    assert first.model.client.is_closed()
    assert not second.model.client.is_closed()


async def test_a_model_carries_the_address_of_the_server_and_says_when_there_is_none():
    service = build_service("fine")
    bound = service.open(seed=1)
    with pytest.raises(ConfigError, match=r"set rollout\.http_port, 0 for a free port"):
        _ = bound.model.base_url
    assert not hasattr(bound.model, "base_url")
    async with service.serve() as url:
        model = service.open(seed=2).model
        assert model.base_url == url == str(model.client.base_url).rstrip("/")
        async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            completion = await client.chat.completions.create(model=model.model_name, messages=USER)
        assert completion.choices[0].message.content == "fine"
    assert not hasattr(service.open(seed=3).model, "base_url")
