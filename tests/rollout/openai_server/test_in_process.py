"""The in-process client: which values it passes on and which it copies."""

from __future__ import annotations

import copy
import gc

import openai
import pytest
from openai.types.chat import ChatCompletionMessage
from served import TOOLS, USER, build_service, create_completion, get_engine

from tunesmith.chat.parsers.incremental import IncrementalParser
from tunesmith.errors import ConfigError
from tunesmith.rollout.recording.open_turn import OpenTurn

pytestmark = pytest.mark.anyio


class Text(str):
    """A subclass of str."""


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
async def test_fast_path_and_transport_parse_messages_equally(messages):
    seen = []
    for is_copy in (False, True, False):
        service = build_service("fine")
        bound = service.open(seed=1)
        client = bound.model.client.copy() if is_copy else bound.model.client
        try:
            await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            seen.append([request[0] for request in get_engine(service).requests])
        except (openai.BadRequestError, TypeError) as error:
            seen.append(type(error))
        bound.close()
    assert seen[0] == seen[1] == seen[2]


async def test_messages_of_an_iterator_are_read():
    service = build_service("fine")
    bound = service.open(seed=1)
    await bound.model.client.chat.completions.create(model="m", messages=iter([MESSAGE]))
    await bound.model.client.chat.completions.create(model="m", messages=[MESSAGE])
    first, second = bound.close()
    assert first.prompt_ids == second.prompt_ids


async def test_in_place_changes_reach_the_next_request_of_that_session_only():
    service = build_service("first", "second", "third")
    messages, tools = [{"role": "user", "content": "hi"}], copy.deepcopy(TOOLS)
    bound_models = [service.open(seed=1), service.open(seed=2)]
    create = [bound.model.client.chat.completions.create for bound in bound_models]
    await create[0](model="m", messages=messages, tools=tools)
    messages[0]["content"] = "bye"
    tools[0]["function"]["name"] = "mul"
    await create[0](model="m", messages=messages, tools=tools)
    await create[1](model="m", messages=USER, tools=TOOLS)
    prompts = [request[0] for request in get_engine(service).requests]
    texts = ["".join(service.recorder.renderer.format_token(i) for i in prompt) for prompt in prompts]
    assert ["bye" in text for text in texts] == ['"mul"' in text for text in texts] == [False, True, False]
    assert prompts[2] == prompts[0]
    assert [len(bound.close()) for bound in bound_models] == [2, 1]


async def test_closing_a_client_leaves_other_clients_open():
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


async def test_base_url_is_the_servers_url_or_an_error():
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


async def test_a_finished_call_leaves_no_cycles_to_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        await create_completion(build_service("fine"))
        left = [type(each).__name__ for each in gc.get_objects() if isinstance(each, OpenTurn | IncrementalParser)]
    finally:
        gc.enable()
    assert left == []
