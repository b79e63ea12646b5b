"""Requests that continue the last message: `continue_final_message`, stop strings in the text, unparsed reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai
import pytest

from chat_templates import QWEN3
from fakes import FakeEngine, build_chat_tokenizer, say
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.service import ModelService
from tunesmith.types import Sampling

pytestmark = pytest.mark.anyio

TOKENIZER = build_chat_tokenizer(QWEN3)
USER = {"role": "user", "content": "hi"}
CONTINUED: Mapping[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}


def build_service(*replies: str) -> ModelService:
    engine = FakeEngine(TOKENIZER, say(TOKENIZER, *replies))
    return ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=300))


async def ask(model, *messages, **extra):
    stop = extra.pop("stop", None)
    fields = {} if stop is None else {"stop": stop}
    create = model.client.chat.completions.create
    return (await create(model="m", messages=list(messages), extra_body=extra, **fields)).choices[0]


def decode(ids) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


async def test_a_reply_begins_with_the_last_message():
    service = build_service("is 4")
    bound = service.open(seed=1)
    choice = await ask(bound.model, USER, {"role": "assistant", "content": "2 + 2 "}, **CONTINUED)
    (turn,) = bound.close()
    assert choice.message.content == "is 4"
    assert decode(turn.prompt_ids).endswith("<|im_start|>assistant\n2 + 2 ")


async def test_a_recorded_reply_is_continued_with_its_ids():
    service = build_service("a <stop> b", "done", "later")
    bound = service.open(seed=1)
    first = await ask(bound.model, USER, stop=["<stop>"], include_stop_str_in_output=True)
    assert (first.message.content, first.finish_reason) == ("a <stop>", "stop")
    text = first.message.content + " seen "
    await ask(bound.model, USER, {"role": "assistant", "content": text}, **CONTINUED)
    whole = {"role": "assistant", "content": text + "done"}
    await ask(bound.model, USER, whole, {"role": "user", "content": "more"})
    one, two, three = bound.close()
    assert two.prompt_ids == one.prompt_ids + one.sampled_ids + tuple(TOKENIZER.encode(" seen "))
    assert three.prompt_ids[: len(two.prompt_ids + two.sampled_ids)] == two.prompt_ids + two.sampled_ids


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_stop_string_that_the_client_appends_is_not_repeated(is_stream):
    service = build_service("a <stop> b", "done")
    bound = service.open(seed=1)
    reply = await bound.model.client.chat.completions.create(
        model="m", messages=[USER], stop=["<stop>"], stream=is_stream
    )
    texts = [chunk.choices[0].delta.content or "" async for chunk in reply] if is_stream else []
    text = "".join(texts) if is_stream else reply.choices[0].message.content
    assert text == "a "
    await ask(bound.model, USER, {"role": "assistant", "content": text + "<stop> seen "}, **CONTINUED)
    one, two = bound.close()
    assert two.prompt_ids == one.prompt_ids + one.sampled_ids + tuple(TOKENIZER.encode(" seen "))


async def test_a_text_without_the_sampled_stop_string_does_not_continue_the_reply():
    service = build_service("a <stop> b", "done")
    bound = service.open(seed=1)
    await ask(bound.model, USER, stop=["<stop>"])
    await ask(bound.model, USER, {"role": "assistant", "content": "a  seen "}, **CONTINUED)
    _, two = bound.close()
    assert decode(two.prompt_ids).endswith("assistant\na  seen ")


async def test_an_end_of_sequence_token_is_not_part_of_a_continued_reply():
    service = build_service("I stop", "and continue")
    bound = service.open(seed=1)
    await ask(bound.model, USER)
    await ask(bound.model, USER, {"role": "assistant", "content": "I stop here"}, **CONTINUED)
    one, two = bound.close()
    assert one.sampled_ids[-1] == TOKENIZER.eos_token_id
    assert two.prompt_ids == one.prompt_ids + one.sampled_ids[:-1] + tuple(TOKENIZER.encode(" here"))


async def test_the_longest_recorded_text_is_continued():
    service = build_service("a", "ab", "c", "d")
    bound = service.open(seed=1)
    await ask(bound.model, USER)
    await ask(bound.model, USER)
    await ask(bound.model, USER, {"role": "assistant", "content": "abc"}, **CONTINUED)
    other = {"role": "user", "content": "another conversation"}
    await ask(bound.model, other, {"role": "assistant", "content": "abc"}, **CONTINUED)
    _, two, three, four = bound.close()
    assert three.prompt_ids == two.prompt_ids + two.sampled_ids[:-1] + tuple(TOKENIZER.encode("c"))
    assert decode(four.prompt_ids).endswith("assistant\nabc")


async def test_reasoning_stays_in_the_content_on_request():
    service = build_service("<think>hm</think>\nyes")
    bound = service.open(seed=1)
    assert (await ask(bound.model, USER)).message.content == "yes"
    raw = await ask(bound.model, USER, separate_reasoning=False)
    assert raw.message.content == "<think>hm</think>\nyes"
    assert not hasattr(raw.message, "reasoning_content")
    bound.close()


async def test_a_streamed_reply_has_the_stop_string_too():
    service = build_service("a <stop> b")
    bound = service.open(seed=1)
    stream = await bound.model.client.chat.completions.create(
        model="m", messages=[USER], stop=["<stop>"], stream=True, extra_body={"include_stop_str_in_output": True}
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "a <stop>"
    bound.close()


@pytest.mark.parametrize(
    ("messages", "extra", "sentence"),
    [
        ([USER], {"continue_final_message": True}, "needs a last message of the assistant"),
        ([{"role": "assistant", "content": "a"}], CONTINUED, "needs a last message of the assistant, after others"),
        (
            [USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}],
            CONTINUED,
            "with content alone",
        ),
        ([USER], {"add_generation_prompt": False}, "must be the opposite of continue_final_message"),
        (
            [USER, {"role": "assistant", "content": "a"}],
            {"continue_final_message": True, "add_generation_prompt": True},
            "must be the opposite of continue_final_message",
        ),
    ],
)
async def test_contradictory_requests_are_refused(messages, extra, sentence):
    bound = build_service("a").open(seed=1)
    with pytest.raises(openai.BadRequestError, match=sentence):
        await ask(bound.model, *messages, **extra)
