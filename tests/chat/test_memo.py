"""Memoization by content."""

from __future__ import annotations

import copy

from tunesmith.chat.memo import build_cache_key, load_cache_key, memoize
from tunesmith.chat.messages import parse_messages, parse_tools

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


class Text(str):
    """A subclass of str."""


def test_cache_keys_differ_for_values_that_compare_equal():
    values = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": [1]}, {"a": (1,)}]
    assert len({build_cache_key(value) for value in values}) == len(values)
    assert build_cache_key({"a": Text("x")}) is None
    assert build_cache_key(object()) is None


def test_equal_values_have_equal_cache_keys():
    text = "".join(["some ", "words"])
    shared = {"a": text, "b": [text, "some words"]}
    assert (
        build_cache_key(shared)
        == build_cache_key(load_cache_key(build_cache_key(shared)))
        == build_cache_key({"a": "some words", "b": ["some words", text]})
    )


def test_a_memoized_function_computes_once_and_limits_entries():
    computed = []

    @memoize(max_entries=2, max_length=3)
    def double(text: str) -> str:
        computed.append(text)
        return text * 2

    assert [double(text) for text in ("a", "a", "b", "a", "c", "b", "a", "long", "long")][-1] == "longlong"
    assert computed == ["a", "b", "c", "b", "a", "long", "long"]


def test_the_cache_is_cleared_at_its_total_length(monkeypatch):
    monkeypatch.setattr("tunesmith.chat.memo.MAX_TOTAL_LENGTH", 5)
    computed = []

    @memoize(max_entries=100, max_length=3)
    def double(text: str) -> str:
        computed.append(text)
        return text * 2

    assert [double(text) for text in ("aa", "bb", "aa", "cc", "cc", "aa")][-1] == "aaaa"
    assert computed == ["aa", "bb", "cc", "aa"]


def test_messages_changed_in_place_are_parsed_again():
    raw = [{"role": "user", "content": [{"type": "text", "text": "one"}]}, {"role": "assistant", "tool_calls": [CALL]}]
    raw = copy.deepcopy(raw)
    before = parse_messages(raw)
    raw[0]["content"][0]["text"] = "two"
    raw[1]["tool_calls"][0]["function"]["arguments"]["a"] = 1.0
    after = parse_messages(raw)
    assert [message.content for message in (before[0], after[0])] == ["one", "two"]
    assert [message.tool_calls[0].arguments for message in (before[1], after[1])] == ['{"a": 1}', '{"a": 1.0}']


def test_tools_changed_in_place_are_parsed_again():
    raw = [copy.deepcopy(TOOL)]
    before = parse_tools(raw)
    raw[0]["function"]["parameters"]["properties"]["a"] = {"type": "integer"}
    after = parse_tools(raw)
    assert before[0]["function"]["parameters"]["properties"] == {}
    assert after[0]["function"]["parameters"]["properties"] == {"a": {"type": "integer"}}
