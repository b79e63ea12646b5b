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
    ReadCall,
    Tools,
    build_call,
    find_close,
    find_json_end,
    load_json,
    read_call,
)
from tunesmith.chat.parsers.hermes import CALL_CLOSE, CALL_OPEN, read_hermes

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


def read_llama(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    """The calls at the start of a reply."""
    has_tag = text.startswith(PYTHON_TAG)
    malformed = Block(length=len(PYTHON_TAG) if has_tag else 1)
    start = _skip(text, len(PYTHON_TAG) if has_tag else 0)
    if start == len(text):
        return malformed if is_end else None
    if text[start] != "{":
        return (_read_builtin(text, start) or malformed) if is_end else None
    block = malformed
    while True:
        try:
            end = find_json_end(text, start)
            call = None if end is None else _build_llama_call(load_json(text[start:end]))
        except ValueError:
            end, call = len(text), None
        if end is None and not is_end:
            return None
        if end is None or call is None:
            return block
        block = Block(length=end, calls=(*block.calls, call))
        separator = _SEPARATOR.match(text, end)
        assert separator is not None
        start = separator.end()
        if start == len(text) and not is_end:
            return None
        if not separator.group(1) or not text.startswith("{", start):
            return block


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


def read_mistral(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    """A list of calls, or one call with its name before the arguments."""
    malformed = Block(length=len(TOOL_CALLS))
    start = _find_mistral_start(text)
    if start is None:
        is_hopeless = len(text) >= len(TOOL_CALLS) + MAX_HEAD_CHARACTERS
        return malformed if is_end or is_hopeless else None
    try:
        end = find_json_end(text, start)
        if end is None:
            return malformed if is_end else None
        calls = _build_mistral_calls(text[len(TOOL_CALLS) : start].strip(), load_json(text[start:end]))
    except ValueError:
        return malformed
    return Block(length=end, calls=calls) if calls else malformed


def _find_mistral_start(text: str) -> int | None:
    """Position of the list or of the arguments."""
    first = _skip(text, len(TOOL_CALLS))
    limit = len(TOOL_CALLS) + MAX_HEAD_CHARACTERS
    if first < limit and text.startswith("[", first):
        return first
    position = text.find("{", first, limit)
    return None if position < 0 else position


def _build_mistral_calls(head: str, value: Any) -> tuple[ReadCall, ...]:
    """The calls; empty if one is malformed."""
    if isinstance(value, list):
        calls = [
            build_call(call.get("name"), call.get("arguments"), call.get("id")) if isinstance(call, dict) else None
            for call in value
        ]
    else:
        found = _HEAD.fullmatch(head)
        calls = [None if found is None else build_call(found.group(1), value, found.group(2))]
    return tuple(call for call in calls if call is not None) if None not in calls else ()


def read_json(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    """A fence, whose values must all be calls, or one bare object; anything else is text.

    A value is JSON or a call in Hermes' tags: the template asks for these, and a model may write both, tags in a fence.
    """
    if text.startswith(CALL_OPEN):
        block = read_hermes(text, tools, is_end=is_end)
        return (
            block
            if block is None or all(_is_listed(each, tools) for each in block.calls)
            else Block(length=block.length)
        )
    return _read_object(text, tools, is_end=is_end) if text.startswith("{") else _read_fence(text, tools, is_end=is_end)


def _read_fence(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    found = _FENCE_START.match(text)
    assert found is not None
    place = start = found.end()
    if CALL_OPEN.startswith(text[start:]) and not is_end:
        return None
    calls: tuple[ReadCall, ...] = ()
    is_text = found.group(1) not in ("", "json", "xml")
    while not is_text and text.startswith(_VALUE_OPENERS, place):
        start = place
        try:
            value = _find_value(text, start, is_end=is_end)
            more = () if value is None else _build_listed_calls(load_json(text[value[0] : value[1]]), tools)
        except ValueError:
            value, more = (0, 0, 0), ()
        if value is None and not is_end:
            return None
        if value is None or not more:
            calls, place = (), start
            break
        calls, place = (*calls, *more), _skip(text, value[2], _BETWEEN)
    ends = find_close(text, FENCE, place, is_end=is_end)
    if ends is None:
        return None
    body_end, length = ends
    return Block(length=length, calls=calls if place >= body_end else ())


def _find_value(text: str, start: int, *, is_end: bool) -> tuple[int, int, int] | None:
    """Where the JSON of a value starts and ends, and where the value ends; None if it needs more text."""
    if text.startswith(CALL_OPEN, start):
        ends = find_close(text, CALL_CLOSE, start + len(CALL_OPEN), is_end=is_end)
        return None if ends is None else (start + len(CALL_OPEN), *ends)
    end = find_json_end(text, start)
    return None if end is None else (start, end, end)


def _read_object(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    first = _skip(text, 1)
    if first == len(text) and not is_end:
        return None
    if not text.startswith('"', first):
        return Block(length=1)
    try:
        end = find_json_end(text, 0)
        if end is None:
            return Block(length=len(text)) if is_end else None
        return Block(length=end, calls=_build_listed_calls(load_json(text[:end]), tools))
    except ValueError:
        return Block(length=1)


def _build_listed_calls(value: Any, tools: Tools) -> tuple[ReadCall, ...]:
    """The calls of an object or a list of objects; empty if one is no call of a listed tool, if tools are known."""
    values = value if isinstance(value, list) else [value]
    found = tuple(call for call in map(read_call, values) if call is not None and _is_listed(call, tools))
    return found if len(found) == len(values) else ()


def _is_listed(call: ReadCall, tools: Tools) -> bool:
    return not tools or any(tool.get("function", {}).get("name") == call.name for tool in tools)


def _skip(text: str, position: int, pattern: re.Pattern[str] = _SPACE) -> int:
    found = pattern.match(text, position)
    assert found is not None  # the pattern matches no text too
    return found.end()


LLAMA3 = CallFormat(
    name="llama3_json",
    openers=(PYTHON_TAG,),
    first_openers=("{",),
    template_tags=('"parameters":',),
    markup=(PYTHON_TAG,),
    read_block=read_llama,
)
MISTRAL = CallFormat(
    name="mistral",
    openers=(TOOL_CALLS,),
    template_tags=(TOOL_CALLS,),
    markup=(TOOL_CALLS, CALL_ID, ARGS),
    read_block=read_mistral,
)
JSON = CallFormat(name="json", openers=(FENCE, "{", CALL_OPEN), template_tags=(), read_block=read_json)
