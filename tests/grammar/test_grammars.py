"""Grammars allow exactly the replies that they describe, token by token, and masks are computed again exactly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tunesmith.errors import ConfigError
from tunesmith.grammar import terms
from tunesmith.grammar.grammars import (
    CallTexts,
    add_calls,
    add_reasoning,
    build_call_grammar,
    build_choice_grammar,
    build_json_grammar,
    build_regex_grammar,
    build_rule_grammar,
)
from tunesmith.grammar.matcher import GrammarCompiler, TokenMatcher
from tunesmith.grammar.terms import write_tag
from tunesmith.model.pocket import build_pocket_tokenizer

pytest.importorskip("llguidance")
TOKENIZER = build_pocket_tokenizer()
VOCAB_SIZE = 800
SPECIAL_IDS = set(TOKENIZER.all_special_ids)
COMPILER = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_ids=[TOKENIZER.eos_token_id])
TAGS = {tag: write_tag(tag, TOKENIZER.convert_tokens_to_ids(tag)) for tag in ("<think>", "</think>")}
FORMAT = CallTexts(
    start='<tool_call>\n{"name": "',
    middle='", "arguments":',
    end="}\n</tool_call>",
    tokens={tag: TOKENIZER.convert_tokens_to_ids(tag) for tag in ("<tool_call>", "</tool_call>")},
)
TOOLS = [
    {"function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}},
                                                "required": ["a"], "additionalProperties": False}}},
    {"function": {"name": 'say "x"'}},
]  # fmt: skip

UNTYPED_TOOLS = [{"function": {"name": "add", "parameters": {"properties": {"a": {}}, "required": ["a"]}}}]
"""As clients write it by hand; any value is valid under the schema alone."""


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar allows the text, by the longest tokens that it allows, and then the end of the reply."""
    matcher = COMPILER.open(grammar)
    rest = text.encode()
    while rest:
        candidates = [i for i in list_allowed(matcher) if SPELLINGS[i] and rest.startswith(SPELLINGS[i])]
        if not candidates:
            return False
        best = max(candidates, key=lambda i: len(SPELLINGS[i]))
        matcher.accept(best)
        rest = rest[len(SPELLINGS[best]) :]
    return TOKENIZER.eos_token_id in list_allowed(matcher)


def list_allowed(matcher: TokenMatcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(COMPILER.fill_masks([matcher])[0], bitorder="little")).tolist()


BYTES = {text: byte for byte, text in bytes_to_unicode().items()}
SPELLINGS = [
    bytes(BYTES[character] for character in token) if token is not None and index not in SPECIAL_IDS else b""
    for index, token in enumerate(TOKENIZER.convert_ids_to_tokens(list(range(VOCAB_SIZE))))
]
"""The bytes of each token."""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (build_json_grammar({"type": "object", "properties": {"a": {"enum": [1, "b"]}}, "required": ["a"]}),
         ['{"a": 1}', '{"a":"b"}', '{\n  "a": "b",\n  "c": []\n}'], ["{}", '{"a": 2}', '{"a": 1', '{"a": 1} x', ""]),
        (build_regex_grammar("[0-9]{2}/a?"), ["12/", "12/a"], ["1/", "12"]),
        (build_choice_grammar(["yes", 'no "x"\n']), ["yes", 'no "x"\n'], ["ye", "no", "yes yes"]),
        (build_rule_grammar('root ::= "a" b*\nb ::= "b"'), ["a", "abb"], ["b", ""]),
        (build_rule_grammar('start: "a" /[0-9]/'), ["a1"], ["a", "ab"]),
        (build_call_grammar(TOOLS, FORMAT, is_single=True, after="add"),
         [' {"a": 3}}</tool_call>', '{"a":3}}\n</tool_call>'], [' {"b": 3}}</tool_call>', ' {"a": 3}}']),
        (build_call_grammar(TOOLS, FORMAT, is_single=False, after=""),
         ['add", "arguments": {"a": 3}}\n</tool_call>',
          'say \\"x\\"", "arguments":{}}</tool_call>\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}</tool_call>'],
         ['sub", "arguments": {"a": 3}}\n</tool_call>', 'say "x"", "arguments": {}}</tool_call>']),
        (build_call_grammar(UNTYPED_TOOLS, FORMAT, is_single=True, after="add"),
         ['{"a": 3}}</tool_call>'], ["3}</tool_call>", "[]}</tool_call>", "{}}</tool_call>"]),
        (add_calls(build_choice_grammar(["yes"]), build_call_grammar(TOOLS, FORMAT, is_single=True)),
         ["yes", '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'],
         ["no", 'yes<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>', "<tool_call>"]),
        (add_reasoning(build_choice_grammar(["yes"]), think_open=None, think_close=TAGS["</think>"]),
         ["hm, no </think>yes", "\n</think>\n\nyes"], ["yes", "no</think>no"]),
        (add_reasoning(build_choice_grammar(["yes"]), think_open=TAGS["<think>"], think_close=TAGS["</think>"]),
         ["yes", "<think>a {}\n</think>\nyes"], ["hm</think>yes", "<think>yes"]),
        (add_reasoning(build_choice_grammar(["yes"]), think_open='"[THINK]"', think_close='"[/THINK]"'),
         ["yes", "[THINK]a [/\n[/THINK]\nyes"], ["hm[/THINK]yes", "[THINK]yes", "[THINK]a[/THINK]no"]),
        (add_reasoning(build_rule_grammar('start: "(" start ")" | "start" // start'), think_open=None,
                       think_close=TAGS["</think>"]),
         ["a</think>((start))"], ["a</think>(b</think>start)"]),
        (add_calls(build_rule_grammar('start: "(" start ")" | "x"'),
                   build_call_grammar(TOOLS, FORMAT, is_single=True)),
         ["((x))"], ['(<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>)']),
    ],
)  # fmt: skip
def test_grammars_accept_what_they_describe(grammar: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_a_text_that_spells_a_tag_is_not_the_tag() -> None:
    allowed = list_allowed(COMPILER.open(build_choice_grammar(["<tool_call>", "a"])))
    assert TOKENIZER.convert_tokens_to_ids("<tool_call>") not in allowed
    assert {SPELLINGS[token_id] for token_id in allowed} == {b"<", b"a"}


@pytest.mark.parametrize("num_more", [1, 20])
def test_masks_of_a_reply_are_computed_again_and_equal_masks_share_memory(num_more: int) -> None:
    grammar = build_json_grammar({"type": "object"})
    ids = TOKENIZER.encode('{"a": "some longer text with many words in it", "b": 12}')
    matcher, live = COMPILER.open(grammar), []
    for token_id in ids:
        live.append(COMPILER.fill_masks([matcher])[0].tobytes())
        matcher.accept(token_id)
    masks = COMPILER.compute_masks(grammar, ids)
    assert list(masks) == live
    assert len({id(mask) for mask in masks}) == len(set(masks)) < len(ids)
    assert COMPILER.fill_masks([matcher, *(COMPILER.open(grammar) for _ in range(num_more))])[-1].tobytes() == live[0]
    for mask, token_id in zip(masks, ids, strict=True):
        assert mask[token_id // 8] >> (token_id % 8) & 1


def test_keywords_that_no_grammar_expresses_are_refused_unless_the_tool_is_not_strict() -> None:
    schema = {"type": "array", "uniqueItems": True}
    with pytest.raises(ValueError, match="uniqueItems"):
        COMPILER.open(build_json_grammar(schema))
    tool = {"name": "f", "parameters": {"type": "object", "propertyNames": {"pattern": "a"}}}
    COMPILER.open(build_call_grammar([{"function": tool}], FORMAT, is_single=True))
    with pytest.raises(ValueError, match="propertyNames"):
        COMPILER.open(build_call_grammar([{"function": tool | {"strict": True}}], FORMAT, is_single=True))


UNENFORCED: dict[str, object] = {
    "not": {"const": 1}, "if": {"minLength": 1}, "then": {"const": 1}, "else": {"const": 1}, "uniqueItems": True,
    "contains": {"const": 1}, "minContains": 1, "maxContains": 1, "propertyNames": {"pattern": "a"},
    "dependentRequired": {"a": ["b"]}, "dependentSchemas": {"a": {"required": ["b"]}}, "dependencies": {"a": ["b"]},
    "unevaluatedProperties": False, "unevaluatedItems": False, "$dynamicRef": "#a",
    "oneOf": [{"type": "object"}, {"required": ["a"]}],
}  # fmt: skip
"""Keywords of JSON Schema that llguidance does not enforce."""


@pytest.mark.parametrize("keyword", UNENFORCED)
def test_the_documentation_lists_the_keywords_that_are_refused_or_not_enforced(keyword: str) -> None:
    schema = {keyword: UNENFORCED[keyword]}
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
    with pytest.raises(ValueError, match=r"the grammar is invalid"):
        COMPILER.open(build_call_grammar([{"function": tool | {"strict": True}}], FORMAT, is_single=True, after="f"))
    lenient = build_call_grammar([{"function": tool}], FORMAT, is_single=True, after="f")
    assert accepts(lenient, ' {"a": {"a": [1, 1]}}}</tool_call>')
    assert f"`{keyword}`" in Path("docs/endpoint.md").read_text()


def test_other_keywords_are_enforced_and_patterns_with_look_around_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a(?=b)"}}}
    with pytest.raises(ValueError, match="look-around"):
        COMPILER.open(build_call_grammar([{"function": {"name": "f", "parameters": schema}}], FORMAT, is_single=True))
    for schema, good, bad in (
        ({"type": "object", "minProperties": 1, "maxProperties": 1}, '{"a": 1}', "{}"),
        ({"type": "integer", "multipleOf": 3}, "6", "7"),
        ({"type": "string", "format": "date"}, '"2025-01-31"', '"today"'),
        ({"type": "array", "prefixItems": [{"const": 1}], "minItems": 1}, "[1]", "[2]"),
        ({"type": "object", "patternProperties": {"^a": {"const": 1}}}, '{"ab": 1}', '{"ab": 2}'),
        ({"type": "integer", "exclusiveMinimum": 2}, "3", "2"),
        ({"allOf": [{"type": "integer"}, {"minimum": 2}]}, "2", "1"),
    ):
        assert accepts(build_json_grammar(schema), good), schema
        assert not accepts(build_json_grammar(schema), bad), schema


def test_a_rejected_token_and_a_missing_package_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="the grammar rejects token 5"):
        COMPILER.open(build_choice_grammar(["yes"])).accept(5)
    with pytest.raises(ConfigError, match="end-of-sequence"):
        GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_ids=[]).open('start: "a"')
    with pytest.raises(ConfigError, match="fast tokenizer"):
        GrammarCompiler(None, vocab_size=VOCAB_SIZE, eos_ids=[1]).open('start: "a"')
    monkeypatch.setattr(terms, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'tunesmith\[grammar\]'"):
        build_regex_grammar("a")


def test_schemas_are_part_of_the_grammar_as_they_are() -> None:
    schema = {"type": "object", "properties": {"é": {"const": 'a "b"'}}, "required": ["é"]}
    assert accepts(build_json_grammar(schema), json.dumps({"é": 'a "b"'}, ensure_ascii=False))
