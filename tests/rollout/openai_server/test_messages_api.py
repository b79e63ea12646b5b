"""The Messages API with the official Anthropic client, in process and over HTTP."""

from __future__ import annotations

import importlib.util
from typing import Any

import httpx
import pytest
from served import ADD, SUB, build_service, get_engine

from tunesmith.rollout.openai_server.messages_api import translate_request

if importlib.util.find_spec("anthropic") is None:
    pytest.skip("the Anthropic SDK is not installed: pip install anthropic", allow_module_level=True)


class DeferredSdk:
    """The SDK, whose import takes seconds: only the process that runs these tests needs it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for marks of fixtures
            raise AttributeError(name)
        return getattr(importlib.import_module("anthropic"), name)


anthropic = DeferredSdk()
pytestmark = pytest.mark.anyio

USER = [{"role": "user", "content": "hi"}]
TOOLS = [
    {"name": name, "description": "d", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    for name in ("add", "sub")
]


async def ask(client, *, stream: bool = False, **fields):
    fields = {"model": "m", "max_tokens": 300, "messages": USER} | fields
    if not stream:
        return await client.messages.create(**fields)
    async with client.messages.stream(**fields) as events:
        return await events.get_final_message()


async def test_text_in_text_out():
    service = build_service("fine")
    bound = service.open(seed=1)
    client = bound.model.as_anthropic_client()
    message = await ask(
        client,
        system=[{"type": "text", "text": "Be brief."}],
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_k": 3},
    )
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "fine"}]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    (turn,) = bound.close()
    assert "<|im_start|>system\nBe brief.<|im_end|>" in "".join(
        map(service.recorder.renderer.format_token, turn.prompt_ids)
    )
    assert (turn.distribution.temperature, turn.distribution.top_k) == (0.5, 3)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(turn.prompt_ids), len(turn.sampled_ids))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_http", [False, True])
async def test_a_tool_conversation_is_one_sequence(stream, is_http):
    service = build_service(f"<think>hm</think>\n\nso {ADD}{SUB}", "done")
    async with service.serve() as url:
        bound = service.open(seed=1)
        key = bound.model.api_key
        own = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)
        client = own if is_http else bound.model.as_anthropic_client()
        first = await ask(client, stream=stream, tools=TOOLS)
        assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert first.content[0].thinking == "hm"
        assert [(block.name, block.input) for block in first.content[2:]] == [
            ("add", {"a": 1}),
            ("sub", {"b": "\u00e9"}),
        ]
        assert first.stop_reason == "tool_use"
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "42"}]}
            for block in first.content[2:]
        ]
        messages = [*USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        counted = await client.messages.count_tokens(model="m", messages=messages, tools=TOOLS)
        second = await ask(client, stream=stream, tools=TOOLS, messages=messages)
        assert second.content[0].text == "done"
        assert bound.session.num_extended == 1
        one, two = bound.close()
        assert two.prompt_ids[: len(one.prompt_ids + one.sampled_ids)] == one.prompt_ids + one.sampled_ids
        assert counted.input_tokens == len(two.prompt_ids)
        assert [(t.prompt_ids, list(t.sampled_ids)) for t in (one, two)] == get_engine(service).ledger
        await own.close()


async def test_events_come_in_the_order_of_the_api():
    service = build_service(f"<think>hm</think>so {ADD} then")
    client = service.open(seed=1).model.as_anthropic_client()
    stream = await client.messages.create(model="m", max_tokens=300, messages=USER, tools=TOOLS, stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    collapsed = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert collapsed == ["message_start", *block * 4, "message_delta", "message_stop"]
    assert [e.content_block.type for e in events if e.type == "content_block_start"] == [
        "thinking", "text", "tool_use", "text",
    ]  # fmt: skip
    assert [event.index for event in events if event.type == "content_block_stop"] == [0, 1, 2, 3]
    assert events[-2].delta.stop_reason == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reasons(stream):
    client = build_service("say STOP now").open(seed=1).model.as_anthropic_client()
    message = await ask(client, stream=stream, stop_sequences=["STOP"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("say ", "stop_sequence", "STOP")
    message = await ask(client, stream=stream, max_tokens=2)
    assert message.stop_reason == "max_tokens"


async def test_tool_choice_and_thinking():
    service = build_service(ADD)
    client = service.open(seed=1).model.as_anthropic_client()
    message = await ask(
        client,
        tools=TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive"},
    )
    assert [block.type for block in message.content] == ["tool_use"]
    assert get_engine(service).requests[0][1].stop == ("</tool_call>",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "a budget of thinking tokens is not supported"),
        ({"thinking": {"type": "disabled"}}, "chat template has no enable_thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image'"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role is 'system'"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            "allowed: 'custom'",
        ),
        ({"tool_choice": {"type": "tool", "name": "mul"}, "tools": TOOLS}, "tool_choice names 'mul'"),
        ({"extra_body": {"container": "c"}}, "container is not supported"),
        ({"extra_body": {"max_tokens": None}}, "max_tokens is required"),
        ({"extra_body": {"temperature": -1.0}}, "temperature"),
    ],
)
async def test_fields_that_cannot_be_honoured_are_refused(fields, message):
    service = build_service("fine")
    bound = service.open(seed=1)
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        await ask(bound.model.as_anthropic_client(), **fields)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert bound.close() == ()


async def test_a_message_that_starts_the_reply_is_a_chat_request_to_continue_it():
    fields = translate_request(
        {"model": "m", "max_tokens": 5, "messages": [*USER, {"role": "assistant", "content": "The"}]},
        lambda name: False,
    )
    assert fields["messages"] == [*USER, {"role": "assistant", "content": "The"}]
    assert (fields["continue_final_message"], fields["add_generation_prompt"]) == (True, False)


async def test_a_reply_continues_the_message_that_starts_it():
    service = build_service(" answer is 4")
    bound = service.open(seed=1)
    start = {"role": "assistant", "content": [{"type": "text", "text": "The"}]}
    message = await ask(bound.model.as_anthropic_client(), messages=[*USER, start])
    assert [block.text for block in message.content] == [" answer is 4"]
    counted = await bound.model.as_anthropic_client().messages.count_tokens(model="m", messages=[*USER, start])
    (turn,) = bound.close()
    assert counted.input_tokens == len(turn.prompt_ids)
    assert "".join(map(service.recorder.renderer.format_token, turn.prompt_ids)).endswith("assistant\nThe")


def test_a_strict_tool_stays_strict():
    tool = {"name": "add", "input_schema": {"type": "object"}, "strict": True}
    fields = translate_request({"model": "m", "max_tokens": 5, "messages": USER, "tools": [tool]}, lambda name: False)
    function = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    assert fields["tools"] == [{"type": "function", "function": function}]


async def test_errors_have_the_form_of_the_api():
    service = build_service("fine")
    client = service.open(seed=1).model.as_anthropic_client()
    for changed, error in (({"api_key": "wrong"}, anthropic.AuthenticationError),):
        with pytest.raises(error):
            await ask(client.with_options(**changed))
    with pytest.raises(anthropic.NotFoundError, match="serves 'm'"):
        await ask(client, model="other")
    async with client:
        pass
    assert (await ask(service.open(seed=2).model.as_anthropic_client())).content[0].text == "fine"


async def test_a_client_without_keys_uses_the_url():
    service = build_service("fine")
    async with service.serve() as url:
        bound = service.open(seed=1)
        path = f"/t/{bound.model.api_key}/v1/messages"
        body = {"model": "m", "max_tokens": 9, "messages": USER}
        async with httpx.AsyncClient() as client:
            reply = await client.post(url.removesuffix("/v1") + path, json=body)
        assert reply.json()["content"] == [{"type": "text", "text": "fine"}]


async def test_the_base_url_of_a_model_serves_both_kinds_of_clients():
    service = build_service("fine")
    async with service.serve() as url:
        bound = service.open(seed=1)
        assert bound.model.base_url == url
        async with anthropic.AsyncAnthropic(base_url=bound.model.base_url, api_key=bound.model.api_key) as client:
            assert (await ask(client)).content[0].text == "fine"
            assert (await client.messages.count_tokens(model="m", messages=USER)).input_tokens > 0


async def test_the_tool_runner_of_the_sdk_continues_without_a_thread():
    if not hasattr(anthropic, "beta_async_tool"):
        pytest.skip("this Anthropic SDK has no tool runner")

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Add."""
        return str(a + 1)

    service = build_service(ADD, "fine")
    bound = service.open(seed=1)
    client = bound.model.as_anthropic_client()
    runner = client.beta.messages.tool_runner(model="m", max_tokens=300, messages=USER, tools=[add])
    message = await runner.until_done()
    assert message.content[0].text == "fine"
    first, second = bound.close()
    assert second.prompt_ids[: len(first.prompt_ids + first.sampled_ids)] == first.prompt_ids + first.sampled_ids
