"""Prompts by chat template, conversations that go on from sampled tokens, and replies read back."""

from __future__ import annotations

import json
import random

import pytest

from chat_templates import CHATML, GEMMA2, LLAMA3, QWEN3, QWEN25, THINKING
from fakes import build_chat_tokenizer
from tunesmith.model.messages import parse_messages, parse_tools
from tunesmith.model.render import Prompt, Renderer

TOOLS = parse_tools(
    [
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Computes",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
                "strict": True,
            },
        }
    ]
)
CALL = {"id": "call1", "type": "function", "function": {"name": "calculator", "arguments": '{"a": 1}'}}


def build_renderer(template: str, **options) -> Renderer:
    return Renderer(build_chat_tokenizer(template), **options)


def show(renderer: Renderer, ids) -> str:
    return "".join(renderer.format_token(i) for i in ids)


def make_prompt(*messages: dict, tools=()) -> Prompt:
    return Prompt(messages=parse_messages(list(messages)), tools=tools)


def test_prompt_is_what_the_template_says():
    renderer = build_renderer(CHATML)
    prompt = make_prompt({"role": "system", "content": "S"}, {"role": "user", "content": "hi"})
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert show(renderer, renderer.render(prompt)) == text


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "one\ntwo", "name": "bob", "unknown": 3},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]},
    ],
)
def test_clients_may_send_text_or_parts(message):
    renderer = build_renderer(CHATML)
    assert "<|im_start|>user\none\ntwo<|im_end|>" in show(renderer, renderer.render(make_prompt(message)))


def test_developer_is_system_and_function_is_tool():
    messages = parse_messages(
        [{"role": "developer", "content": "d"}, {"role": "function", "name": "f", "content": "r"}]
    )
    assert [message.role for message in messages] == ["system", "tool"]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "type 'image_url'"),
        ({"role": "robot", "content": "x"}, "'robot'; allowed: system"),
        ({"role": "user", "content": 3}, "got int"),
        ("hi", r"messages\[0\] must be an object"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "function.name"),
    ],
)
def test_what_a_text_model_cannot_read_is_refused(message, said):
    with pytest.raises(ValueError, match=said):
        parse_messages([message])


def test_arguments_reach_the_template_as_objects_and_strict_is_dropped():
    renderer = build_renderer(QWEN25)
    text = show(
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
    assert '"arguments": {oops}' in show(renderer, renderer.render(prompt))


def test_tools_go_to_the_system_message_of_templates_without_tools():
    renderer = build_renderer(CHATML)
    text = show(
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


def test_system_joins_the_user_where_the_template_refuses_it():
    renderer = build_renderer(GEMMA2)
    prompt = make_prompt({"role": "system", "content": "S"}, {"role": "user", "content": "q"})
    text = "<|begin_of_text|><start_of_turn>user\nS\n\nq<end_of_turn>\n<start_of_turn>model\n"
    assert show(renderer, renderer.render(prompt)) == text


def test_what_the_template_refuses_is_a_clear_error():
    renderer = build_renderer(GEMMA2)
    with pytest.raises(ValueError, match="refuses these messages: Conversation roles must alternate"):
        renderer.render(make_prompt({"role": "user", "content": "a"}, {"role": "user", "content": "b"}))


def test_thinking_follows_the_run_and_the_request_wins():
    renderer = build_renderer(QWEN3, enable_thinking=False)
    prompt = make_prompt({"role": "user", "content": "q"})
    assert show(renderer, renderer.render(prompt)).endswith("<think>\n\n</think>\n\n")
    asked = Prompt(messages=prompt.messages, variables=(("enable_thinking", True),))
    assert show(renderer, renderer.render(asked)).endswith("<|im_start|>assistant\n")


# Going on from a recorded turn


def extend(renderer: Renderer, history: list[dict], sampled: str, reply: dict, new: list[dict], *, end="<|im_end|>"):
    """The old prompt, the sampled ids, and the prompt of the conversation that goes on."""
    tools = TOOLS if reply.get("tool_calls") else ()
    prompt_ids = renderer.render(make_prompt(*history, tools=tools))
    sampled_ids = renderer._encode(sampled + end)
    extended = renderer.extend(
        make_prompt(*history, reply, *new, tools=tools),
        num_old=len(history) + 1,
        prompt_ids=prompt_ids,
        sampled_ids=sampled_ids,
        is_ended=bool(end),
    )
    return prompt_ids, sampled_ids, extended


USER = {"role": "user", "content": "q"}
NEXT = {"role": "user", "content": "next"}


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
def test_prompt_goes_on_from_the_sampled_tokens(template, end, delta, is_ended):
    renderer = build_renderer(template)
    prompt_ids, sampled_ids, extended = extend(
        renderer, [USER], " An  answer", {"role": "assistant", "content": "An  answer"}, [NEXT], end=end * is_ended
    )
    assert extended[: len(prompt_ids) + len(sampled_ids)] == prompt_ids + sampled_ids
    assert show(renderer, extended[len(prompt_ids) + len(sampled_ids) :]) == end * (not is_ended) + delta


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3, LLAMA3, GEMMA2])
def test_a_conversation_without_quirks_renders_the_same_anew(template):
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
    assert "hm" not in show(renderer, anew)
    assert show(renderer, extended).replace(sampled, "fine") == show(renderer, anew)


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3])
def test_calls_are_kept_as_sampled_and_results_follow(template):
    renderer = build_renderer(template)
    sampled = 'so <tool_call>{"arguments":{"a":1},  "name":"calculator"}</tool_call>'
    reply = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "2", "tool_call_id": "call1"}
    prompt_ids, sampled_ids, extended = extend(renderer, [USER], sampled, reply, [result])
    delta = "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert show(renderer, extended) == show(renderer, prompt_ids + sampled_ids) + delta


def test_templates_that_show_no_content_beside_calls_still_go_on():
    renderer = build_renderer(LLAMA3)
    reply = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "2", "tool_call_id": "call1"}
    prompt_ids, sampled_ids, extended = extend(renderer, [USER], "call", reply, [result], end="<|eot_id|>")
    assert show(renderer, extended[len(prompt_ids + sampled_ids) :]) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"2"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n'
    )


def test_an_end_token_that_is_not_the_templates_takes_its_place():
    renderer = build_renderer(CHATML)
    prompt_ids, sampled_ids, extended = extend(
        renderer, [USER], "x", {"role": "assistant", "content": "x"}, [NEXT], end="<|endoftext|>"
    )
    delta = show(renderer, extended[len(prompt_ids + sampled_ids) :])
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
    ],
    ids=["sentinel cut", "no end of turn", "refused", "system hoisted"],
)
def test_a_template_that_cannot_tell_the_delta_says_so(template, new):
    *_, extended = extend(build_renderer(template), [USER], "x", {"role": "assistant", "content": "x"}, new)
    assert extended is None


# Reading replies


def read(
    renderer: Renderer, text: str, *, prompt: str = "", has_tools: bool = True, pieces: int | None = None, **options
):
    """Parse a reply, cut into random pieces where a seed is given; the sum of the deltas."""
    numbers = iter(range(100))
    parser = renderer.build_parser(
        renderer._encode(prompt), new_call_id=lambda: f"id{next(numbers)}", has_tools=has_tools, **options
    )
    cuts = sorted(random.Random(pieces).choices(range(len(text) + 1), k=6)) if pieces is not None else []
    deltas = [parser.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    deltas.append(parser.finish())
    return (
        "".join(d.reasoning for d in deltas),
        "".join(d.content for d in deltas),
        [(call.call_id, call.name, json.loads(call.arguments)) for d in deltas for call in d.tool_calls],
    )


A = '<tool_call>\n{"name": "a", "arguments": {"x": [1, "}"]}}\n</tool_call>'
B = '<tool_call>{"name": "b", "arguments": {}}</tool_call>'
BAD = '<tool_call>\n{"name": "a", "arguments": {"x": 1}\n</tool_call>'
REPLIES = [
    ("plain text \n", ("", "plain text \n", [])),
    ("", ("", "", [])),
    (A, ("", "", [("id0", "a", {"x": [1, "}"]})])),
    (f"first\n{A}\n{B}\n", ("", "first", [("id0", "a", {"x": [1, "}"]}), ("id1", "b", {})])),
    (f"one {B} two {B}", ("", "one  two", [("id0", "b", {}), ("id1", "b", {})])),
    (f" {BAD} ", ("", f" {BAD} ", [])),
    (f"{BAD}\n{B}", ("", BAD, [("id0", "b", {})])),
    ('<tool_call>{"name": "b", "arguments": {}}', ("", "", [("id0", "b", {})])),
    ('x <tool_call>{"name": "b", "argu', ("", 'x <tool_call>{"name": "b", "argu', [])),
    ("<think>\nhm, 1 < 2\n</think>\n\nfine", ("hm, 1 < 2", "fine", [])),
    (f"\n<think>hm</think>{B}", ("hm", "", [("id0", "b", {})])),
    ("<think> cut sho", ("cut sho", "", [])),
    ("<think>a</think>b<think>c</think>", ("a", "b<think>c</think>", [])),
    ("no </think> here <tool", ("", "no </think> here <tool", [])),
    ("  <thin", ("", "  <thin", [])),
]


@pytest.mark.parametrize(("text", "expected"), REPLIES)
def test_replies_are_read_whole_and_in_any_pieces(text, expected):
    renderer = build_renderer(QWEN25)
    assert read(renderer, text) == expected
    assert all(read(renderer, text, pieces=seed) == expected for seed in range(40))


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "a", "arguments": {"x": NaN}}',
        '{"name": "a", "arguments": "{}"}',
        '{"name": "a"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '["a"]',
        "[" * 5000,
        '{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}",
        '{"name": "a", "arguments": {"x": "\\ud800"}}',
        '{"name": "a", "arguments": {}} {}',
    ],
)
def test_malformed_calls_stay_text(body):
    text = f"<tool_call>{body}</tool_call>"
    assert read(build_renderer(QWEN25), text) == ("", text, [])


def test_reasoning_that_the_prompt_opened_is_reasoning():
    renderer = build_renderer(THINKING)
    prompt = show(renderer, renderer.render(make_prompt(USER)))
    assert prompt.endswith("<think>\n")
    for seed in [None, *range(20)]:
        assert read(renderer, "hm\n</think>\n\nfine", prompt=prompt, pieces=seed) == ("hm", "fine", [])


def test_parsers_can_be_switched_off():
    renderer = build_renderer(QWEN25, tool_call_parser="none", reasoning_parser="none")
    text = f"<think>a</think>{B}"
    assert read(renderer, text) == ("", text, [])
    assert read(build_renderer(QWEN25), B, has_tools=False) == ("", B, [])


def test_stop_strings_are_cut_with_what_follows():
    renderer = build_renderer(QWEN25)
    for seed in [None, *range(40)]:
        assert read(renderer, "say STOP and go", stop=["STOP", "go"], pieces=seed) == ("", "say ", [])
        assert read(renderer, "say STO", stop=["STOP"], pieces=seed) == ("", "say STO", [])


def test_a_single_call_ends_the_reply():
    renderer = build_renderer(QWEN25)
    for seed in [None, *range(40)]:
        assert read(renderer, f"so\n{B}, and {A}", is_single_call=True, pieces=seed) == ("", "so", [("id0", "b", {})])


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3])
def test_forced_calls_begin_as_the_template_writes_them(template):
    renderer = build_renderer(template)
    text, ids = renderer.build_call_prefix("calculator", ())
    assert text == '<tool_call>\n{"name": "calculator", "arguments":'
    assert show(renderer, ids) == text
    assert renderer.build_call_prefix(None, ())[0] == '<tool_call>\n{"name": "'
    tight = build_renderer(QWEN25.replace("""'\\n<tool_call>\\n{"name": "'""", """'<tool_call>{"name": "'"""))
    assert tight.build_call_prefix("f", ())[0] == '<tool_call>{"name": "f", "arguments":'


def test_a_forced_call_closes_the_reasoning_first():
    renderer = build_renderer(THINKING)
    prompt_ids = renderer.render(make_prompt(USER))
    text, ids = renderer.build_call_prefix("f", prompt_ids)
    assert text == '\n</think>\n\n<tool_call>\n{"name": "f", "arguments":'
    assert not renderer.is_reasoning_open(prompt_ids + ids)


# Ids -> text


def test_text_hides_special_tokens_but_not_markup():
    renderer = build_renderer(QWEN25)
    ids = renderer._encode("a<|im_start|><think>b</think><tool_call>c<|im_end|>")
    assert renderer.decode(ids) == "a<think>b</think><tool_call>c"


@pytest.mark.parametrize("seed", range(30))
def test_a_text_stream_adds_up_to_the_decoded_text(seed):
    renderer = build_renderer(QWEN25)
    rng = random.Random(seed)
    ids = renderer._encode("naive \u00e9t\u00e9 \u4f60\u597d \U0001f600 <tool_call>")
    ids = [i if rng.random() < 0.8 else rng.randrange(400) for i in ids for _ in range(rng.choice([1, 1, 2]))]
    stream = renderer.build_text_stream()
    pieces = [stream.feed(token_id) for token_id in ids]
    assert "".join(pieces) + stream.finish() == renderer.decode(ids)


def test_unfinished_characters_are_held():
    renderer = build_renderer(QWEN25)
    first, *rest = renderer._encode("\U0001f600")
    stream = renderer.build_text_stream()
    assert [stream.feed(i) for i in (first, *rest)] == [""] * len(rest) + ["\U0001f600"]
