"""Direct rendering of templates, and deltas rendered without the earlier conversation."""

from __future__ import annotations

import copy
from datetime import datetime

import pytest
from jinja2 import Environment
from jinja2.exceptions import TemplateError
from rendering import CALL, TOOLS, USER, build_renderer, make_prompt
from transformers.utils import chat_template_utils

from chat_templates import CHATML, GEMMA2, LLAMA3, QWEN3, QWEN25, THINKING
from fakes import build_chat_tokenizer
from tunesmith.chat.call_probe import SENTINEL
from tunesmith.chat.messages import Message, ToolCall, parse_messages
from tunesmith.chat.renderer import Prompt
from tunesmith.chat.template import ChatTemplate
from tunesmith.chat.template_rendering import JinjaTemplate, is_rendered_from_neighbors

TEMPLATES = (CHATML, GEMMA2, LLAMA3, QWEN3, QWEN25, THINKING)
RESULT = {"role": "tool", "tool_call_id": "call1", "content": "\u20ac <1>"}
ASKED = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [CALL]}


def render_or_refuse(render, *args, **options) -> str:
    try:
        return render(*args, **options)
    except TemplateError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"bos_token": "B"}, {"documents": [{"a": "b"}]}])
def test_direct_rendering_equals_apply_chat_template(template, variables):
    tokenizer = build_chat_tokenizer(template)
    jinja = JinjaTemplate(tokenizer)
    assert jinja.is_direct
    messages = [message.to_template() for message in parse_messages([USER, ASKED, RESULT])]
    for given in (messages[:1], messages[:2], messages):
        for tools in ((), TOOLS):
            options = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": True, **variables}
            expected = render_or_refuse(tokenizer.apply_chat_template, given, **options)
            options = {"tools": tools, "variables": variables, "has_generation_prompt": True}
            assert render_or_refuse(jinja.render, given, **options) == expected


def test_an_overridden_apply_chat_template_is_used():
    class Shouting(type(build_chat_tokenizer(CHATML))):
        def apply_chat_template(self, *args, **kwargs):
            return super().apply_chat_template(*args, **kwargs).upper()

    tokenizer = build_chat_tokenizer(CHATML)
    tokenizer.__class__ = Shouting
    jinja = JinjaTemplate(tokenizer)
    assert not jinja.is_direct
    text = jinja.render([USER], tools=(), variables={}, has_generation_prompt=True)
    assert text == tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|IM_START|>ASSISTANT\n")


@pytest.mark.parametrize(("template", "expected"), [(CHATML, True), (QWEN25, True), (QWEN3, False), (GEMMA2, False)])
def test_known_templates_are_classified(template, expected):
    assert is_rendered_from_neighbors(Environment().parse(template)) == expected


BODY = "{{ message.content }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}" + BODY + "{{ messages | length }}{% endfor %}",
        "{% for m in messages %}{{ messages[-1].content }}{% endfor %}",
        "{% for m in messages %}{{ messages[1].content }}{% endfor %}",
        "{% for m in messages %}{{ messages[loop.index0 - 2].content }}{% endfor %}",
        "{% for m in messages %}{{ messages[loop.index - 1].content }}{% endfor %}",
        "{% for m in messages %}{{ loop.index0 }}{% endfor %}",
        "{% for m in messages %}{% if loop.index0 == 1 %}x{% endif %}{% endfor %}",
        "{% for m in messages %}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{% for m in messages %}{% set l = loop %}{{ l.index0 }}{% endfor %}",
        "{% for m in messages %}{% for c in m.content %}{{ messages[loop.index0 - 1].role }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        "{% for t in tools %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfor %}",
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
        "{% set messages = messages %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
        "{% for m in messages %}{{ raise_exception(m.role) }}{% endfor %}",
        "{% for m in messages %}{{ m.content | random }}{% endfor %}",
        "{% macro f(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}",
        "{{ messages | tojson }}",
    ],
)
def test_templates_that_may_read_other_messages_are_rejected(source):
    assert not is_rendered_from_neighbors(Environment().parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}",
        "{% for m in messages %}{% if loop.first or loop.index0 == 0 %}{{ m.role }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if loop.last %}{{ messages[loop.index0 + 1] }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% for c in m.calls %}{{ c.name ~ loop.index }}{% endfor %}{% endfor %}{{ eos_token }}",
    ],
)
def test_templates_that_read_neighboring_messages_are_accepted(source):
    assert is_rendered_from_neighbors(Environment().parse(source))


def make_history(*, has_system: bool, num_rounds: int, num_results: int) -> list[Message]:
    messages = [Message(role="system", content="S")] if has_system else []
    messages.append(Message(role="user", content="q"))
    for turn in range(num_rounds):
        calls = tuple(
            ToolCall(call_id=f"id{turn}{i}", name="calculator", arguments='{"a": 1}') for i in range(num_results)
        )
        messages.append(Message(role="assistant", content=f"say {turn}", tool_calls=calls))
        messages += [
            Message(role="tool", content=f"r{turn}{i}", tool_call_id=f"id{turn}{i}") for i in range(num_results)
        ]
        if not num_results:
            messages.append(Message(role="user", content=f"and {turn}?"))
    return messages


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("has_system", [True, False])
@pytest.mark.parametrize("num_results", [0, 1, 2])
def test_delta_equals_that_of_the_whole_conversation(template, has_system, num_results):
    renders = ChatTemplate(build_chat_tokenizer(template), tool_call_parser="hermes")
    for num_rounds in range(5):
        history = make_history(has_system=has_system, num_rounds=num_rounds, num_results=num_results)
        reply = Message(role="assistant", content=SENTINEL)
        for new in ([Message(role="user", content="next")], [Message(role="user", content="a"), *history[-1:]]):
            messages = [*history, reply, *new]
            for tools in ((), TOOLS):
                try:
                    expected = renders.find_delta(renders.render(messages, tools=tools))
                except ValueError:  # the template requires alternating roles
                    continue
                assert renders.render_delta(messages, tools=tools, variables={}) == expected


def test_a_long_conversation_is_rendered_from_its_last_messages():
    renders = ChatTemplate(build_chat_tokenizer(CHATML), tool_call_parser="hermes")
    history = make_history(has_system=True, num_rounds=3, num_results=0)
    rendered = []
    plain = renders._jinja.render
    renders._jinja.render = lambda messages, *rest: rendered.append(len(messages)) or plain(messages, *rest)
    reply, new = Message(role="assistant", content=SENTINEL), Message(role="user", content="next")
    renders.render_delta([*history, reply, new], tools=(), variables={})
    renders.render_delta([*history, reply, new], tools=(), variables={})
    assert rendered == [4, 4]


def test_other_uses_of_the_tokenizer_do_not_change_encoding():
    renderer = build_renderer(QWEN25)
    renderer._tokenizer.pad_token = "<|endoftext|>"
    text = "<|im_start|>user\nwhat is a function?<|im_end|>\n"
    expected = renderer._tokenizer.encode(text, add_special_tokens=False)
    assert list(renderer.encode(text)) == expected
    for options in ({"truncation": True, "max_length": 2}, {"split_special_tokens": True}, {"padding": "max_length"}):
        renderer._tokenizer(text, **({"max_length": 64} | options))
        assert list(renderer.encode(text)) == expected


def test_cached_text_depends_on_tools_and_variables():
    renderer = build_renderer(QWEN3)
    plain, tooled = make_prompt(USER), make_prompt(USER, tools=TOOLS)
    assert renderer.render(plain) != renderer.render(tooled) == renderer.render(tooled)
    renderer = build_renderer(QWEN25)
    assert renderer.render(plain) != renderer.render(tooled) == renderer.render(tooled)


@pytest.mark.parametrize("template", [QWEN25, QWEN3, CHATML])
def test_a_changed_message_tool_or_variable_is_rendered_again(template):
    """Each change is made in place, in an object that was rendered before."""
    renderer = build_renderer(template)
    tool = copy.deepcopy(TOOLS[0])
    options = {"enable_thinking": False}
    call = {"id": "call1", "type": "function", "function": {"name": "calculator", "arguments": {"a": 1}}}
    raw = [dict(USER), {"role": "assistant", "content": "", "tool_calls": [call]}, dict(USER)]

    def render() -> list[int]:
        prompt = Prompt(messages=parse_messages(raw), tools=(tool,), variables=tuple(options.items()))
        fresh = build_renderer(template).render(prompt)
        assert renderer.render(prompt) == renderer.render(prompt) == fresh
        return fresh

    rendered = [render()]
    tool["function"]["parameters"]["properties"]["a"]["type"] = "number"
    rendered.append(render())
    raw[0]["content"] = "Q"
    rendered.append(render())
    for value in (1.0, True, "1"):  # all but the last equal 1
        call["function"]["arguments"]["a"] = value
        rendered.append(render())
    options["enable_thinking"] = True
    if template is QWEN3:
        rendered.append(render())
    assert len(set(rendered)) == len(rendered)


def test_a_template_that_reads_the_date_is_rendered_each_time(monkeypatch):
    class Clock:
        today = datetime(2026, 5, 1)

        @classmethod
        def now(cls):
            return cls.today

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    renderer = build_renderer(CHATML + "{{ strftime_now('%d') }}")
    first = renderer.render(make_prompt(USER))
    Clock.today = datetime(2026, 5, 2)
    assert renderer.render(make_prompt(USER)) != first
