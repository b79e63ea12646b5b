"""Tool calls as JSON without closing tags: Llama 3, Mistral, and models that write JSON whatever their template says.

Llama 3: `{"name": ..., "parameters": {...}}` as the whole reply, optionally after `<|python_tag|>`, several separated
by `;`; or a built-in tool, `<|python_tag|>name.call(key="value")`.
Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]`, or, in newer models, `[TOOL_CALLS]name{...}` for
each call, with `[CALL_ID]id` and `[ARGS]` before the arguments in some versions.
Format `json`: objects `{"name": ..., "arguments": {...}}` anywhere in the reply, bare or in a fence of Markdown, as
Qwen2.5-Coder writes them although its template asks for Hermes' tags; it also writes these tags in a fence. Only an
object with the name of a listed tool is a call.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from tunesmith.chat.parsers.call_format import (
    NAME_PATTERN,
    Block,
    CallFormat,
    ClosingTag,
    JsonEnd,
    ReadCall,
    Tools,
    build_call,
    load_json,
)
from tunesmith.chat.parsers.hermes import CALL_CLOSE, CALL_OPEN, HERMES

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MAX_HEAD_CHARACTERS = 256
"""Longest text between `[TOOL_CALLS]` and the arguments."""

FENCE = "```"
_VALUE_OPENERS = ("{", "[", CALL_OPEN)
_FENCE_START = re.compile(rf"{FENCE}(\w*)\s*")
_BETWEEN = re.compile(r"[\s,;]*")
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"\s*(;\s*)?")
_BUILTIN = re.compile(rf"\s*({NAME_PATTERN})\.call\(.*\)\s*", re.DOTALL)
_HEAD = re.compile(rf"({NAME_PATTERN})\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\]\s*)?")


class _LlamaReader:
    """Reads the calls at the start of a reply."""

    def __init__(self) -> None:
        self._calls: list[ReadCall] = []
        self._start = self._end = 0
        """Start of the call being read, and end of the one before."""
        self._json_end: JsonEnd | None = None
        """None before the first call and between calls."""

    def read(self, text: str, *, is_end: bool) -> Block | None:
        opener = PYTHON_TAG if text.startswith(PYTHON_TAG) else "{"
        malformed = Block(length=len(opener))
        if not self._calls and self._json_end is None:
            start = _skip_space(text, len(PYTHON_TAG) if opener == PYTHON_TAG else 0)
            if start == len(text):
                return malformed if is_end else None
            if text[start] != "{":
                return (_read_builtin(text, start) or malformed) if is_end else None
            self._start, self._json_end = start, JsonEnd(start)
        while True:
            if self._json_end is not None:
                try:
                    end = self._json_end.find(text)
                    call = None if end is None else _build_llama_call(load_json(text[self._start : end]))
                except ValueError:
                    end, call = len(text), None
                if end is None and not is_end:
                    return None
                if end is None or call is None:
                    return self._build_block() if self._calls else malformed
                self._calls.append(call)
                self._end, self._json_end = end, None
            separator = _SEPARATOR.match(text, self._end)
            assert separator is not None
            self._start = separator.end()
            if self._start == len(text) and not is_end:
                return None
            if not separator.group(1) or not text.startswith("{", self._start):
                return self._build_block()
            self._json_end = JsonEnd(self._start)

    def _build_block(self) -> Block:
        return Block(length=self._end, calls=tuple(self._calls))


def _build_llama_call(call: Any) -> ReadCall | None:
    if not isinstance(call, dict):
        return None
    return build_call(call.get("name"), call["parameters"] if "parameters" in call else call.get("arguments"))


def _read_builtin(text: str, start: int) -> Block | None:
    """A call of a built-in tool with literal values as keyword arguments."""
    found = _BUILTIN.fullmatch(text, start)
    if found is None:
        return None
    try:
        call = ast.parse(text[start:].strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        built = build_call(found.group(1), {str(each.arg): ast.literal_eval(each.value) for each in call.keywords})
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError, MemoryError):
        return None
    return None if built is None else Block(length=len(text), calls=(built,))


class _MistralReader:
    """Reads a list of calls, or one call with its name before the arguments."""

    def __init__(self) -> None:
        self._json_end: JsonEnd | None = None
        self._start = 0

    def read(self, text: str, *, is_end: bool) -> Block | None:
        malformed = Block(length=len(TOOL_CALLS))
        if self._json_end is None:
            start = self._find_start(text)
            if start is None:
                is_hopeless = len(text) >= len(TOOL_CALLS) + MAX_HEAD_CHARACTERS
                return malformed if is_end or is_hopeless else None
            self._start, self._json_end = start, JsonEnd(start)
        try:
            end = self._json_end.find(text)
            if end is None:
                return malformed if is_end else None
            calls = self._build_calls(text, load_json(text[self._start : end]))
        except ValueError:
            return malformed
        return Block(length=end, calls=calls) if calls else malformed

    @staticmethod
    def _find_start(text: str) -> int | None:
        """Position of the list or of the arguments."""
        first = _skip_space(text, len(TOOL_CALLS))
        limit = len(TOOL_CALLS) + MAX_HEAD_CHARACTERS
        if first < limit and text.startswith("[", first):
            return first
        position = text.find("{", first, limit)
        return None if position < 0 else position

    def _build_calls(self, text: str, value: Any) -> tuple[ReadCall, ...]:
        """The calls; empty if one is malformed."""
        if isinstance(value, list):
            calls = [
                build_call(call.get("name"), call.get("arguments"), call.get("id")) if isinstance(call, dict) else None
                for call in value
            ]
        else:
            head = _HEAD.fullmatch(text[len(TOOL_CALLS) : self._start].strip())
            calls = [None if head is None else build_call(head.group(1), value, head.group(2))]
        return tuple(call for call in calls if call is not None) if None not in calls else ()


class _JsonReader:
    """Reads a fence, whose values must all be calls, or one bare object; anything else is text.

    A value is JSON or a call in Hermes' tags: the template asks for these, and a model may write both, tags in a fence.
    """

    def __init__(self, tools: Tools) -> None:
        self._names = {tool.get("function", {}).get("name") for tool in tools}
        assert HERMES.open_reader is not None
        self._tagged = HERMES.open_reader(tools)
        self._calls: list[ReadCall] = []
        self._start: int | None = None
        """Start of the value being read; None before the first one."""
        self._value_end: JsonEnd | ClosingTag | None = None
        """None between values, and if the fence holds something else."""

    def read(self, text: str, *, is_end: bool) -> Block | None:
        if text.startswith(CALL_OPEN):
            block = self._tagged.read(text, is_end=is_end)
            return block if block is None or all(map(self._is_listed, block.calls)) else Block(length=block.length)
        if text.startswith("{"):
            return self._read_object(text, is_end=is_end)
        if self._start is None:
            found = _FENCE_START.match(text)
            assert found is not None
            if CALL_OPEN.startswith(text[found.end() :]) and not is_end:
                return None
            self._start = found.end()
            if found.group(1) in ("", "json", "xml") and text.startswith(_VALUE_OPENERS, self._start):
                self._value_end = self._open_value(text, self._start)
        while self._value_end is not None:
            try:
                value = self._find_value(text, is_end=is_end)
                calls = () if value is None else self._build_calls(load_json(text[value]))
            except ValueError:
                value, calls = slice(0), ()
            if value is None and not is_end:
                return None
            self._calls = [*self._calls, *calls] if calls else []
            if value is not None and calls:
                self._start = value.stop + (len(CALL_CLOSE) if isinstance(self._value_end, ClosingTag) else 0)
            self._value_end = None
        return self._end_fence(text, is_end=is_end)

    def _open_value(self, text: str, start: int) -> JsonEnd | ClosingTag:
        return ClosingTag(CALL_OPEN, CALL_CLOSE) if text.startswith(CALL_OPEN, start) else JsonEnd(start)

    def _find_value(self, text: str, *, is_end: bool) -> slice | None:
        """Where the JSON of the value is; None if it needs more text."""
        if isinstance(self._value_end, JsonEnd):
            end = self._value_end.find(text)
            return None if end is None else slice(self._start, end)
        assert self._value_end is not None and self._start is not None
        ends = self._value_end.find(text[self._start :], is_end=is_end)
        return None if ends is None else slice(self._start + len(CALL_OPEN), self._start + ends[0])

    def _end_fence(self, text: str, *, is_end: bool) -> Block | None:
        """What follows a value: another one, or the end of the fence; or the end of a fence with something else."""
        assert self._start is not None
        between = _BETWEEN.match(text, self._start)
        assert between is not None
        place = between.end() if self._calls else self._start
        if self._calls and text.startswith(_VALUE_OPENERS, place):
            self._start, self._value_end = place, self._open_value(text, place)
            return self.read(text, is_end=is_end)
        close = text.find(FENCE, place)
        if close < 0 and not is_end:
            return None
        body_end, length = (len(text), len(text)) if close < 0 else (close, close + len(FENCE))
        return Block(length=length, calls=tuple(self._calls) if place >= body_end else ())

    def _read_object(self, text: str, *, is_end: bool) -> Block | None:
        first = _skip_space(text, 1)
        if first == len(text) and not is_end:
            return None
        if not text.startswith('"', first):
            return Block(length=1)
        self._value_end = self._value_end or JsonEnd(0)
        assert isinstance(self._value_end, JsonEnd)
        try:
            end = self._value_end.find(text)
            if end is None:
                return Block(length=len(text)) if is_end else None
            return Block(length=end, calls=self._build_calls(load_json(text[:end])))
        except ValueError:
            return Block(length=1)

    def _build_calls(self, value: Any) -> tuple[ReadCall, ...]:
        """The calls of an object or a list of objects; empty if one is no call of a listed tool, if tools are known."""
        values = value if isinstance(value, list) else [value]
        calls = [build_call(each.get("name"), each.get("arguments")) for each in values if isinstance(each, dict)]
        found = tuple(call for call in calls if call is not None and self._is_listed(call))
        return found if len(found) == len(values) else ()

    def _is_listed(self, call: ReadCall) -> bool:
        return not self._names or call.name in self._names


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


LLAMA3 = CallFormat(
    name="llama3_json",
    openers=(PYTHON_TAG,),
    first_openers=("{",),
    template_tags=('"parameters":',),
    markup=(PYTHON_TAG,),
    arguments_start=r'\{\s*"a"',
    open_reader=lambda tools: _LlamaReader(),
)
MISTRAL = CallFormat(
    name="mistral",
    openers=(TOOL_CALLS,),
    template_tags=(TOOL_CALLS,),
    markup=(TOOL_CALLS, CALL_ID, ARGS),
    arguments_start=r'\{\s*"a"',
    open_reader=lambda tools: _MistralReader(),
)
JSON = CallFormat(
    name="json",
    openers=(FENCE, "{", CALL_OPEN),
    template_tags=(),
    arguments_start=r'\{\s*"a"',
    open_reader=_JsonReader,
)
