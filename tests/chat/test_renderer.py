"""Prompts rendered by chat templates, and prompts that extend recorded turns."""

from __future__ import annotations

import json

import pytest
from rendering import CALL, NEXT, TOOLS, USER, build_renderer, extend, make_prompt, to_text

from chat_templates import CHATML, GEMMA2, LLAMA3, QWEN3, QWEN25
from tunesmith.chat.messages import parse_messages
from tunesmith.chat.renderer import Prompt


def test_prompt_is_rendered_by_the_template():
    renderer = build_renderer(CHATML)
    prompt = make_prompt({"role": "system", "content": "S"}, {"role": "user", "content": "hi"})
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert to_text(renderer, renderer.render(prompt)) == text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "one\ntwo", "name": "bob", "unknown": 3},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]},
    ],
)
def test_content_may_be_text_or_text_parts(message):
    renderer = build_renderer(CHATML)
    assert "<|im_start|>user\none\ntwo<|im_end|>" in to_text(renderer, renderer.render(make_prompt(message)))


def test_developer_and_function_roles_are_mapped():
    messages = parse_messages(
        [{"role": "developer", "content": "d"}, {"role": "function", "name": "f", "content": "r"}]
    )
    assert [message.role for message in messages] == ["system", "tool"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "type 'image_url'"),
        ({"role": "robot", "content": "x"}, "'robot'; allowed: system"),
        ({"role": "user", "content": 3}, "got int"),
        ("hi", r"messages\[0\] must be an object"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "function.name"),
    ],
)
def test_unsupported_messages_are_refused(message, error):
    with pytest.raises(ValueError, match=error):
        parse_messages([message])


def test_arguments_reach_the_template_as_objects_and_strict_is_dropped():
    renderer = build_renderer(QWEN25)
    text = to_text(
        renderer,
        renderer.render(
            make_prompt(
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "2", "tool_call_id": "call1"},
                tools=TOOLS,
            )
        ),
    )
    assert '<|im_start|>assistant\n\n<tool_call>\n{"name": "calculator", "arguments": {"a": 1}}\n</tool_call>' in text
    assert '"name": "calculator", "description"' in text
    assert "strict" not in text


def test_malformed_arguments_in_the_history_stay_text():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{oops"}}
    renderer = build_renderer(QWEN25)
    prompt = make_prompt({"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert '"arguments": {oops}' in to_text(renderer, renderer.render(prompt))


def test_tools_are_described_in_the_system_message_for_templates_without_tools():
    renderer = build_renderer(CHATML)
    text = to_text(
        renderer,
        renderer.render(
            make_prompt(
                {"role": "system", "content": "S"},
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "so", "tool_calls": [CALL, CALL]},
                {"role": "tool", "content": "2", "tool_call_id": "call1"},
                {"role": "tool", "content": "3", "tool_call_id": "call1"},
                tools=TOOLS,
            )
        ),
    )
    assert text.startswith("<|im_start|>system\nS\n\n# Tools")
    assert json.dumps(TOOLS[0]) in text
    call = '<tool_call>\n{"name": "calculator", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\nso\n{call}\n{call}<|im_end|>\n" in text
    results = "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
    assert text.endswith(f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n")


def test_tools_are_described_in_the_system_message_if_the_parser_cannot_parse_the_templates_calls(caplog):
    prompt = make_prompt({"role": "user", "content": "q"}, tools=TOOLS)
    own = to_text(renderer := build_renderer(LLAMA3, tool_call_parser="none"), renderer.render(prompt))
    assert "Given these functions" in own
    assert not caplog.records
    told = to_text(renderer := build_renderer(LLAMA3, tool_call_parser="hermes"), renderer.render(prompt))
    assert "Given these functions" not in told
    assert "Today: 26 Jul 2024\n\n# Tools" in told
    renderer.render(prompt)
    assert len(caplog.records) == 1


def test_system_is_merged_into_user_for_templates_without_system_role():
    renderer = build_renderer(GEMMA2)
    prompt = make_prompt({"role": "system", "content": "S"}, {"role": "user", "content": "q"})
    text = "<|begin_of_text|><start_of_turn>user\nS\n\nq<end_of_turn>\n<start_of_turn>model\n"
    assert to_text(renderer, renderer.render(prompt)) == text


def test_messages_rejected_by_the_template_raise_a_clear_error():
    renderer = build_renderer(GEMMA2)
    with pytest.raises(ValueError, match="rejects these messages: Conversation roles must alternate"):
        renderer.render(make_prompt({"role": "user", "content": "a"}, {"role": "user", "content": "b"}))


def test_request_overrides_enable_thinking():
    renderer = build_renderer(QWEN3, enable_thinking=False)
    prompt = make_prompt({"role": "user", "content": "q"})
    assert to_text(renderer, renderer.render(prompt)).endswith("<think>\n\n</think>\n\n")
    asked = Prompt(messages=prompt.messages, variables=(("enable_thinking", True),))
    assert to_text(renderer, renderer.render(asked)).endswith("<|im_start|>assistant\n")


# Extending a recorded turn


@pytest.mark.parametrize(
    ("template", "end", "delta"),
    [
        (CHATML, "<|im_end|>", "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"),
        (QWEN25, "<|im_end|>", "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"),
        (QWEN3, "<|im_end|>", "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"),
        (
            LLAMA3,
            "<|eot_id|>",
            "<|start_header_id|>user<|end_header_id|>\n\nnext<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (GEMMA2, "<end_of_turn>", "\n<start_of_turn>user\nnext<end_of_turn>\n<start_of_turn>model\n"),
    ],
)
@pytest.mark.parametrize("is_ended", [True, False])
def test_extended_prompt_starts_with_the_sampled_tokens(template, end, delta, is_ended):
    renderer = build_renderer(template)
    prompt_ids, sampled_ids, extended = extend(
        renderer, [USER], " An  answer", {"role": "assistant", "content": "An  answer"}, [NEXT], end=end * is_ended
    )
    assert extended[: len(prompt_ids) + len(sampled_ids)] == prompt_ids + sampled_ids
    assert to_text(renderer, extended[len(prompt_ids) + len(sampled_ids) :]) == end * (not is_ended) + delta


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3, LLAMA3, GEMMA2])
def test_extended_prompt_equals_the_rendered_conversation(template):
    renderer = build_renderer(template)
    end = renderer._template.end_of_turn
    reply = {"role": "assistant", "content": "fine"}
    *_, extended = extend(renderer, [USER], "fine", reply, [NEXT], end=end)
    assert extended == renderer.render(make_prompt(USER, reply, NEXT))


def test_dropped_reasoning_stays_in_the_sequence():
    renderer = build_renderer(QWEN3)
    sampled = "<think>\nhm\n</think>\n\nfine"
    prompt_ids, sampled_ids, extended = extend(
        renderer, [USER], sampled, {"role": "assistant", "content": "fine"}, [NEXT]
    )
    assert extended[: len(prompt_ids) + len(sampled_ids)] == prompt_ids + sampled_ids
    anew = renderer.render(make_prompt(USER, {"role": "assistant", "content": "fine"}, NEXT))
    assert "hm" not in to_text(renderer, anew)
    assert to_text(renderer, extended).replace(sampled, "fine") == to_text(renderer, anew)


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3])
def test_tool_calls_are_kept_as_sampled(template):
    renderer = build_renderer(template)
    sampled = 'so <tool_call>{"arguments":{"a":1},  "name":"calculator"}</tool_call>'
    reply = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "2", "tool_call_id": "call1"}
    prompt_ids, sampled_ids, extended = extend(renderer, [USER], sampled, reply, [result])
    delta = "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert to_text(renderer, extended) == to_text(renderer, prompt_ids + sampled_ids) + delta


def test_templates_that_omit_content_next_to_calls_can_be_extended():
    renderer = build_renderer(LLAMA3, tool_call_parser="none")
    reply = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "2", "tool_call_id": "call1"}
    prompt_ids, sampled_ids, extended = extend(renderer, [USER], "call", reply, [result], end="<|eot_id|>")
    assert to_text(renderer, extended[len(prompt_ids + sampled_ids) :]) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )


HEADERS = """{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|start_header_id|>' }}{{ m.content }}
{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>{% endif %}"""


@pytest.mark.parametrize(("end", "delta"), [("<|im_start|>", "next"), ("", "<|im_start|>next")])
def test_the_next_header_may_end_a_turn(end, delta):
    renderer = build_renderer(HEADERS)
    reply = {"role": "assistant", "content": "fine"}
    prompt_ids, sampled_ids, extended = extend(renderer, [USER], "fine", reply, [NEXT], end=end)
    assert to_text(renderer, extended[len(prompt_ids + sampled_ids) :]) == f"{delta}<|start_header_id|>"


def test_a_different_end_token_replaces_the_templates():
    renderer = build_renderer(CHATML)
    prompt_ids, sampled_ids, extended = extend(
        renderer, [USER], "x", {"role": "assistant", "content": "x"}, [NEXT], end="<|endoftext|>"
    )
    delta = to_text(renderer, extended[len(prompt_ids + sampled_ids) :])
    assert delta == "\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"


HOISTING = """{% for m in messages if m.role == 'system' %}{{ 'S:' + m.content }}{% endfor %}
{%- for m in messages if m.role != 'system' %}{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "new"),
    [
        (CHATML.replace("message['content']", "message['content'][:3]"), [NEXT]),
        (CHATML.replace("<|im_end|>", "\n"), [NEXT]),
        (GEMMA2, [NEXT, NEXT]),
        (
            HOISTING,
            [{"role": "system", "content": "late rule"}, NEXT],
        ),
        (CHATML.replace("in messages", "in messages[:2]"), [NEXT]),
    ],
    ids=["sentinel cut", "no end of turn", "refused", "system hoisted", "message dropped"],
)
def test_an_undetermined_delta_is_none(template, new):
    *_, extended = extend(build_renderer(template), [USER], "x", {"role": "assistant", "content": "x"}, new)
    assert extended is None
