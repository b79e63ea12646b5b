"""The Responses API with the official client, in process: items, streams, bridging, refused fields."""

from __future__ import annotations

import json
from itertools import pairwise

import openai
import pytest
from served import ADD, DEFAULTS, SUB, USER, build_service, get_engine

from call_templates import HARMONY, build_family_tokenizer
from chat_templates import QWEN25, THINKING
from fakes import FakeEngine, say
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.openai_server.responses_api import translate_request
from tunesmith.rollout.service import ModelService

pytestmark = pytest.mark.anyio

TOOLS = [
    {"type": "function", "name": name, "description": "d", "parameters": {"type": "object"}, "strict": True}
    for name in ("add", "sub")
]


THOUGHT = "<|channel|>analysis<|message|>{}<|end|>"
HARMONY_TEXT = "<|channel|>commentary<|message|>I add.<|end|>"
HARMONY_CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'


async def stream_events(client, **fields):
    stream = await client.responses.create(model="m", stream=True, **fields)
    return [event async for event in stream]


async def respond(client, *, stream: bool = False, **fields):
    """The response, or the one in the last event."""
    if not stream:
        return await client.responses.create(model="m", **fields)
    return (await stream_events(client, **fields))[-1].response


async def test_text_in_text_out():
    service = build_service("fine")
    bound = service.open(seed=1)
    response = await bound.model.client.responses.create(
        model="m", instructions="Be brief.", input="hi", max_output_tokens=20, temperature=0.5, metadata={"a": "b"}
    )
    assert response.output_text == "fine"
    assert (response.status, response.instructions, response.metadata) == ("completed", "Be brief.", {"a": "b"})
    (turn,) = bound.close()
    text = "".join(map(service.recorder.renderer.format_token, turn.prompt_ids))
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert (turn.distribution.temperature, get_engine(service).requests[0][1].max_tokens) == (0.5, 20)
    assert response.usage.input_tokens == len(turn.prompt_ids)
    assert response.usage.output_tokens == len(turn.sampled_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_tool_conversation_is_one_sequence(stream, is_stored):
    service = build_service(f"<think>hm</think>\n\nso {ADD}{SUB}", "done", "again")
    bound = service.open(seed=1)
    first = await respond(bound.model.client, stream=stream, input="hi", tools=TOOLS)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == "hm"
    assert first.output_text == "so"
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", {"a": 1}), ("sub", {"b": "\u00e9"})]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "42"} for call in calls]
    if is_stored:
        fields = {"previous_response_id": first.id, "input": results}
    else:
        fields = {"input": [USER[0], *(item.to_dict() for item in first.output), *results], "store": False}
    second = await respond(bound.model.client, stream=stream, tools=TOOLS, **fields)
    assert second.output_text == "done"
    if is_stored:
        third = await respond(
            bound.model.client, stream=stream, tools=TOOLS, previous_response_id=second.id, input="more"
        )
        assert third.output_text == "again"
    assert bound.session.num_extended == bound.session.num_calls - 1
    turns = bound.close()
    for before, after in pairwise(turns):
        whole = before.prompt_ids + before.sampled_ids
        assert after.prompt_ids[: len(whole)] == whole
    assert [(turn.prompt_ids, list(turn.sampled_ids)) for turn in turns] == get_engine(service).ledger


async def test_text_after_a_streamed_call_stays_in_the_turn_of_the_call():
    service = build_service(f"<think>hm</think>{ADD}\nthat was a call", "done")
    bound = service.open(seed=1)
    first = await respond(bound.model.client, stream=True, input="hi", tools=TOOLS)
    assert [item.type for item in first.output] == ["reasoning", "function_call", "message"]
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "42"}
    items = [USER[0], *(item.to_dict() for item in first.output), result]
    await respond(bound.model.client, input=items, tools=TOOLS)
    before, after = bound.close()
    whole = before.prompt_ids + before.sampled_ids
    assert after.prompt_ids[: len(whole)] == whole


@pytest.mark.parametrize(
    ("parts", "kinds", "reasoning"),
    [
        (
            [THOUGHT.format("one"), HARMONY_TEXT, THOUGHT.format("two")],
            ["reasoning", "message", "reasoning"],
            "one\ntwo",
        ),
        ([HARMONY_TEXT, THOUGHT.format("two")], ["message", "reasoning"], "two"),
    ],
)
async def test_every_reasoning_of_a_streamed_reply_is_an_item_and_stays_in_its_turn(parts, kinds, reasoning):
    tokenizer = build_family_tokenizer(HARMONY, eos_token="<|call|>")
    reply = "<|start|>assistant".join([*parts, HARMONY_CALL])
    engine = FakeEngine(tokenizer, say(tokenizer, reply))
    service = ModelService(engine, Renderer(tokenizer), model_name="m", sampling=DEFAULTS)
    bound = service.open(seed=1)
    first = await respond(bound.model.client, stream=True, input="hi", tools=TOOLS)
    *others, call = first.output
    assert ([item.type for item in others], call.type) == (kinds, "function_call")
    assert "".join(item.content[0].text for item in others if item.type == "reasoning") == reasoning
    assert len({item.id for item in first.output}) == len(first.output)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    await respond(bound.model.client, input=[USER[0], *(item.to_dict() for item in first.output), result], tools=TOOLS)
    before, after = bound.close()
    whole = before.prompt_ids + before.sampled_ids
    assert after.prompt_ids[: len(whole)] == whole


async def test_a_response_of_one_client_is_continued_by_another_over_http():
    service = build_service("fine", "again")
    async with service.serve() as url:
        bound = service.open(seed=1)
        first = await respond(bound.model.client, input="hi")
        async with openai.AsyncOpenAI(base_url=url, api_key=bound.session.key, max_retries=0) as client:
            second = await respond(client, input="more", previous_response_id=first.id)
        assert second.output_text == "again"
        assert len(bound.close()) == 2


async def test_events_come_in_the_order_of_the_api():
    service = build_service(f"<think>hm</think>so {ADD}", template=QWEN25)
    events = await stream_events(service.open(seed=1).model.client, input="hi", tools=TOOLS)
    kinds = [event.type.removeprefix("response.") for event in events]
    collapsed = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    assert collapsed == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message", "function_call"]
    assert events[-1].response.usage.output_tokens > 0


@pytest.mark.parametrize("reply", ["", "plain", f"a {ADD} b {SUB}", f"{ADD}", "<think>only"])
async def test_a_streamed_response_equals_a_complete_one(reply):
    outputs = []
    for stream in (False, True):
        service = build_service(reply)
        response = await respond(service.open(seed=1).model.client, stream=stream, input="hi", tools=TOOLS)
        items = [item.to_dict() for item in response.output]
        outputs.append(sorted(({**item, "id": ""} for item in items), key=str))
    assert outputs[0] == outputs[1]


async def test_the_clients_own_stream_helper_reads_the_events():
    client = build_service(f"so {ADD}").open(seed=1).model.client
    async with client.responses.stream(model="m", input="hi", tools=TOOLS) as events:
        kinds = [event.type async for event in events]
        response = await events.get_final_response()
    assert kinds[-1] == "response.completed"
    assert response.output_text == "so"
    assert [item.arguments for item in response.output if item.type == "function_call"] == ['{"a": 1}']


async def test_reasoning_opened_by_the_template_and_a_length_limit():
    service = build_service("a long thought", template=THINKING)
    for stream in (False, True):
        response = await respond(service.open(seed=1).model.client, stream=stream, input="x", max_output_tokens=3)
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].type == "reasoning"


async def test_logprobs_of_the_sampled_tokens():
    service = build_service("fine")
    response = await respond(service.open(seed=1).model.client, input="hi", include=["message.output_text.logprobs"])
    assert [token.token for token in response.output[0].content[0].logprobs][-1] == "<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input must be text or a non-empty list"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input_image"),
        ({"previous_response_id": "resp_x"}, "previous_response_id='resp_x' is no stored response"),
        ({"truncation": "auto"}, "truncation='auto' is not supported"),
        ({"background": True}, "background=True is not supported"),
        ({"conversation": "conv_1"}, "conversation is not supported"),
        ({"tools": [{"type": "web_search"}]}, "only functions are supported"),
        ({"tool_choice": {"type": "file_search"}}, "name a function"),
        ({"tool_choice": {"type": "function", "name": "mul"}, "tools": TOOLS}, "tool_choice names 'mul'"),
        ({"include": ["reasoning.encrypted_content"]}, "include="),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary is not supported"),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort is not used by this model's chat template"),
        ({"text": {"format": {"type": "grammar"}}}, "response_format"),
        ({"max_tool_calls": 3}, "max_tool_calls is not supported"),
        ({"extra_body": {"guided_json": {}}}, "guided_json is not supported"),
        ({"instructions": 3}, "instructions must be text"),
    ],
)
async def test_fields_that_cannot_be_honoured_are_refused(fields, message):
    service = build_service("fine")
    bound = service.open(seed=1)
    with pytest.raises(openai.BadRequestError, match=message):
        await bound.model.client.responses.create(model="m", **({"input": "hi"} | fields))
    assert bound.close() == ()


async def test_responses_are_stored_for_their_own_key_only():
    service = build_service("fine")
    bound = service.open(seed=1)
    stored = await bound.model.client.responses.create(model="m", input="hi")
    other = service.open(seed=2).model.client
    with pytest.raises(openai.BadRequestError, match="is no stored response of this API key"):
        await other.responses.create(model="m", input="hi", previous_response_id=stored.id)
    unstored = await bound.model.client.responses.create(model="m", input="hi", store=False)
    with pytest.raises(openai.BadRequestError, match="is no stored response"):
        await bound.model.client.responses.create(model="m", input="hi", previous_response_id=unstored.id)


def test_items_of_two_responses_are_two_replies():
    """After a reply that was cut off, a client samples again without an item of the user in between."""

    def say(kind: str, name: str, text: str) -> dict:
        parts = [{"type": "output_text" if kind == "message" else "reasoning_text", "text": text}]
        return {"id": name, "type": kind, "role": "assistant", "content": parts}

    question = {"role": "user", "content": "?"}
    items = [say("message", "msg_r1", "A"), say("reasoning", "rs_r2_0", "so"), say("message", "msg_r2", "B")]
    messages = translate_request({"model": "m", "input": [question, *items]})["messages"]
    assert messages[1:] == [
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "reasoning_content": "so", "content": "B"},
    ]
    whole = [say("message", "msg_r1", "A"), say("reasoning", "rs_r1_1", "so")]
    messages = translate_request({"model": "m", "input": [question, *whole]})["messages"]
    assert messages[1:] == [{"role": "assistant", "content": "A", "reasoning_content": "so"}]
