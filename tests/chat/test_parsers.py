"""Parsing of replies, complete and in pieces, and prefixes of forced tool calls."""

from __future__ import annotations

import json
import random

import pytest
from rendering import USER, build_renderer, make_prompt, to_text

from chat_templates import CHATML, QWEN3, QWEN25, THINKING
from tunesmith.chat.renderer import Renderer


def read(
    renderer: Renderer, text: str, *, prompt: str = "", has_tools: bool = True, pieces: int | None = None, **options
):
    """Parse a reply, cut into random pieces if a seed is given; returns the joined deltas."""
    numbers = iter(range(100))
    parser = renderer.build_parser(
        renderer.encode(prompt), new_call_id=lambda: f"id{next(numbers)}", has_tools=has_tools, **options
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
def test_replies_parse_equally_whole_and_in_pieces(text, expected):
    renderer = build_renderer(QWEN25)
    assert read(renderer, text) == expected
    assert all(read(renderer, text, pieces=seed) == expected for seed in range(40))
    parser = renderer.build_parser(
        (), new_call_id=lambda numbers=iter(range(100)): f"id{next(numbers)}", has_tools=True
    )
    whole = parser.parse(text)
    calls = [(call.call_id, call.name, json.loads(call.arguments)) for call in whole.tool_calls]
    assert (whole.reasoning or "", whole.content, calls) == expected


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
def test_malformed_calls_stay_in_the_content(body):
    text = f"<tool_call>{body}</tool_call>"
    assert read(build_renderer(QWEN25), text) == ("", text, [])


def test_reasoning_opened_by_the_prompt_is_parsed():
    renderer = build_renderer(THINKING)
    prompt = to_text(renderer, renderer.render(make_prompt(USER)))
    assert prompt.endswith("<think>\n")
    for seed in [None, *range(20)]:
        assert read(renderer, "hm\n</think>\n\nfine", prompt=prompt, pieces=seed) == ("hm", "fine", [])


def test_parsers_can_be_disabled():
    renderer = build_renderer(QWEN25, tool_call_parser="none", reasoning_parser="none")
    text = f"<think>a</think>{B}"
    assert read(renderer, text) == ("", text, [])
    assert read(build_renderer(QWEN25), B, has_tools=False) == ("", B, [])


def test_text_from_a_stop_string_on_is_dropped():
    renderer = build_renderer(QWEN25)
    for seed in [None, *range(40)]:
        assert read(renderer, "say STOP and go", stop=["STOP", "go"], pieces=seed) == ("", "say ", [])
        assert read(renderer, "say STO", stop=["STOP"], pieces=seed) == ("", "say STO", [])
        # of stop strings that overlap the first that is complete ends the text
        assert read(renderer, "say\n\nUser: x", stop=["\n\nUser:", "User"], pieces=seed) == ("", "say\n\n", [])


def test_a_single_call_ends_the_reply():
    renderer = build_renderer(QWEN25)
    for seed in [None, *range(40)]:
        assert read(renderer, f"so\n{B}, and {A}", is_single_call=True, pieces=seed) == ("", "so", [("id0", "b", {})])


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3])
def test_forced_call_prefix_matches_the_template(template):
    renderer = build_renderer(template)
    text, ids = renderer.build_call_prefix("calculator", ())
    assert text == '<tool_call>\n{"name": "calculator", "arguments":'
    assert to_text(renderer, ids) == text
    assert renderer.build_call_prefix(None, ())[0] == '<tool_call>\n{"name": "'
    tight = build_renderer(QWEN25.replace("""'\\n<tool_call>\\n{"name": "'""", """'<tool_call>{"name": "'"""))
    assert tight.build_call_prefix("f", ())[0] == '<tool_call>{"name": "f", "arguments":'


def test_a_forced_call_closes_the_reasoning_first():
    renderer = build_renderer(THINKING)
    prompt_ids = renderer.render(make_prompt(USER))
    text, ids = renderer.build_call_prefix("f", prompt_ids)
    assert text == '\n</think>\n\n<tool_call>\n{"name": "f", "arguments":'
    assert not renderer.is_reasoning_open(prompt_ids + ids)
