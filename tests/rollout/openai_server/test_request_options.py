"""Fields of chat requests that are parsed once give the same requests each time."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from tunesmith.rollout.openai_server.fields import RequestError
from tunesmith.rollout.openai_server.request import RequestParser
from tunesmith.types import Distribution, Sampling

DEFAULTS = Sampling(max_tokens=10)
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def build_parser() -> RequestParser:
    return RequestParser(lambda name: name in ("reasoning_effort", "a", "b"))


BODIES = [
    {},
    {"temperature": 0.5, "max_tokens": 3, "stop": ["a", "b"], "seed": 4, "n": 2, "user": "me"},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"reasoning_effort": "low", "chat_template_kwargs": {"b": [1], "a": None}},
    {"logprobs": True, "top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}},
    {"response_format": {"type": "json_object"}},
]


@pytest.mark.parametrize("body", BODIES)
def test_a_repeated_request_equals_the_first(body):
    parser = build_parser()
    first, prompt = parser.parse({"messages": USER, **body}, DEFAULTS)
    other = [*USER, {"role": "assistant", "content": "a"}, *USER]
    second, second_prompt = parser.parse({**copy.deepcopy(body), "messages": other}, DEFAULTS)
    alone, alone_prompt = build_parser().parse({"messages": other, **body}, DEFAULTS)
    for field in dataclasses.fields(alone):
        if field.name != "constraint":
            assert getattr(first, field.name) == getattr(second, field.name) == getattr(alone, field.name)
    assert second_prompt == alone_prompt
    assert prompt == build_parser().parse({"messages": USER, **body}, DEFAULTS)[1]
    kinds = [None if each.constraint is None else each.constraint.build_grammar() for each in (first, second, alone)]
    assert kinds[0] == kinds[1] == kinds[2]


def test_defaults_and_types_of_values_are_told_apart():
    parser = build_parser()
    body = {"messages": USER, "max_tokens": 5}
    hot = dataclasses.replace(DEFAULTS, distribution=Distribution(temperature=2.0))
    assert parser.parse(body, DEFAULTS)[0].sampling.distribution.temperature == 1.0
    assert parser.parse(body, hot)[0].sampling.distribution.temperature == 2.0
    assert parser.parse({**body, "logprobs": True}, DEFAULTS)[0].has_logprobs
    with pytest.raises(RequestError, match="logprobs must be true or false"):
        parser.parse({**body, "logprobs": 1}, DEFAULTS)


SCHEMA = {"name": "x", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 7}, "max_tokens=3 and max_completion_tokens=7 are one limit"),
        ({"chat_template_kwargs": {"thinking": False, "a": 1}}, "chat template does not use thinking; leave it out"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema is not supported"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**SCHEMA, "x": 1}}},
            "json_schema.x is not supported",
        ),
        ({"response_format": "json_schema"}, "response_format must be an object, got"),
        ({"messages": [*USER, {"role": "assistant", "content": "{", "prefix": True}]}, "continue_final_message"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "an object names one tool"),
        ({"messages": [*USER, {"role": "assistant", "audio": {"id": "a"}}]}, "audio is not supported"),
    ],
)
def test_what_would_have_no_effect_is_refused(body, sentence):
    with pytest.raises(RequestError, match=sentence):
        build_parser().parse({"messages": USER, **body}, DEFAULTS)


def test_names_for_one_limit_may_agree_and_unused_template_variables_may_be_null():
    body = {"max_tokens": 3, "max_completion_tokens": 3, "chat_template_kwargs": {"thinking": None, "a": 1}}
    request, prompt = build_parser().parse({"messages": USER, **body}, DEFAULTS)
    assert request.sampling.max_tokens == 3
    assert prompt.variables == (("a", 1),)


def test_a_refusal_is_the_text_of_a_message_without_content():
    refusal = {"role": "assistant", "content": None, "refusal": "I cannot."}
    _, prompt = build_parser().parse({"messages": [*USER, refusal, *USER]}, DEFAULTS)
    assert prompt.messages[1].content == "I cannot."


@pytest.mark.parametrize("body", [{"unknown": 1}, {"temperature": -1}, {"n": 0}, {"tool_choice": "required"}])
def test_a_refused_request_is_refused_again(body):
    parser = build_parser()
    messages = []
    for _ in range(2):
        with pytest.raises(RequestError) as error:
            parser.parse({"messages": USER, **body}, DEFAULTS)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_tools_changed_in_place_are_other_tools():
    parser, tools = build_parser(), [copy.deepcopy(TOOL)]
    before, _ = parser.parse({"messages": USER, "tools": tools}, DEFAULTS)
    tools[0]["function"]["name"] = "g"
    after, _ = parser.parse({"messages": USER, "tools": tools}, DEFAULTS)
    assert [each.tools[0]["function"]["name"] for each in (before, after)] == ["f", "g"]


def test_a_continued_reply_is_checked_each_time():
    parser = build_parser()
    body = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [*USER, {"role": "assistant", "content": "so"}]
    for _ in range(2):
        _, prompt = parser.parse({"messages": messages, **body}, DEFAULTS)
        assert (prompt.reply_start, len(prompt.messages)) == ("so", 1)
        with pytest.raises(RequestError, match="continue_final_message needs a last message of the assistant"):
            parser.parse({"messages": USER, **body}, DEFAULTS)
