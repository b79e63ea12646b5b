"""Formats of tool calls, as the reply parser sees them: their tags, and a function that reads one block of calls.

A block starts with an opener, such as `<tool_call>`, and holds one call or several. The function gets the text from the
opener on, again when it has grown, and decides as soon as the text determines where the block ends. So the result does
not depend on how the text was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

Tools = Sequence[Mapping[str, Any]]
"""Tools of the request, as `parse_tools` returns them; formats without JSON types read the types of arguments there."""

MAX_REFERENCES = 16
"""References that are followed to resolve one schema; a cycle ends there."""
NAME_PATTERN = r"[^\s<>\[\]{}\"'=,;()|]+"
"""A function name in formats that write it without quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCall:
    """One call of a block."""

    name: str
    arguments: str
    """A JSON object."""
    call_id: str | None = None
    """The id that the model wrote, if the format has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block that ended; without calls it is malformed, and its text is content."""

    length: int
    """Characters of the block; of a malformed one, those that cannot start another block."""
    calls: tuple[ReadCall, ...] = ()


class ReadBlock(Protocol):
    """Reads one block."""

    def __call__(self, text: str, tools: Tools, *, is_end: bool) -> Block | None:
        """The block at the start of the text; None if it needs more text. At the end of the text, always a block."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """A format of tool calls."""

    name: str
    """Value of `model.tool_call_parser`."""
    openers: tuple[str, ...]
    """Texts that start a block anywhere in the content."""
    first_openers: tuple[str, ...] = ()
    """Texts that start a block only as the first text of the content."""
    template_tags: tuple[str, ...]
    """Texts of which one is in each chat template that writes calls in this format; empty if no template does."""
    close: str | None = None
    """Tag after which a reply with at most one call is complete."""
    markup: tuple[str, ...] = ()
    """Tags that decoding must keep, although a tokenizer may have them as special tokens."""
    turn_ends: tuple[str, ...] = ()
    """Tags of `markup` that may end an assistant message; the others are inside of one."""
    arguments_start: str = r'\{\s*"a"'
    """Pattern of the start of the arguments `{"a": 1}` in a rendered call."""
    argument_ends: tuple[str, ...] = ()
    """In formats with a tag for each argument, the tag that ends one, and others that no value can contain; empty if
    the arguments are one JSON object."""
    read_block: ReadBlock | None
    """None for harmony, whose calls are messages of their own (`HarmonyParser`)."""

    @property
    def inner_markup(self) -> frozenset[str]:
        """Tags that never end an assistant message."""
        return frozenset(self.markup) - frozenset(self.turn_ends)


def build_call(name: Any, arguments: Any, call_id: Any = None) -> ReadCall | None:
    """A call from a decoded name and arguments; None unless they are text and an object."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return ReadCall(name=name, arguments=text, call_id=call_id if isinstance(call_id, str) else None)


def read_call(value: Any) -> ReadCall | None:
    """A call from a decoded `{"name": str, "arguments": object}`; None for another value."""
    return build_call(value.get("name"), value.get("arguments")) if isinstance(value, dict) else None


def parse_call(name: str, arguments: str) -> ReadCall | None:
    """A call from its name and the JSON text of its arguments; None unless they are an object."""
    try:
        return build_call(name, load_json(arguments))
    except ValueError:
        return None


def load_json(text: str) -> Any:
    """Decode strict JSON; raises ValueError, also for NaN and for too deep nesting."""
    try:
        return _DECODER.decode(text.strip())
    except RecursionError as error:
        raise ValueError("too deep") from error


def find_parameters(tools: Tools, name: str) -> Mapping[str, Any]:
    """The JSON schemas of a function's parameters; empty if the request's tools have none."""
    named = [each for each in tools if each.get("function", {}).get("name") == name]
    schema = resolve_tool(named[0])["function"].get("parameters") if named else None
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def resolve_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool whose parameters have their references to definitions resolved."""
    function = dict(tool["function"])
    schema = resolve_schema(function.get("parameters"), function.get("parameters"))
    if isinstance(schema, Mapping):
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            resolved = {name: resolve_schema(each, schema) for name, each in properties.items()}
            schema = {**schema, "properties": resolved}
        function["parameters"] = schema
    return {**tool, "function": function}


def resolve_schema(schema: Any, root: Any, *, depth: int = 0) -> Any:
    """A schema with what decides its type: references of the schema itself and of its alternatives are resolved."""
    if not isinstance(schema, Mapping) or not isinstance(root, Mapping) or depth > MAX_REFERENCES:
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
    parts = [_find_definition(schema["$ref"], root)] if "$ref" in schema else []
    whole = schema.get("allOf")
    if isinstance(whole, list) and len(whole) == 1:
        parts += whole
    elif whole is not None:
        rest["allOf"] = whole
    if parts and not all(isinstance(part, Mapping) for part in parts):
        return schema
    for part in parts:
        resolved = resolve_schema(part, root, depth=depth + 1)
        if not isinstance(resolved, Mapping) or "$ref" in resolved:
            return schema
        rest = {**resolved, **rest}
    for key in ("anyOf", "oneOf"):
        if isinstance(rest.get(key), list):
            rest[key] = [resolve_schema(each, root, depth=depth + 1) for each in rest[key]]
    return rest


def _find_definition(reference: Any, root: Mapping[str, Any]) -> Any:
    """The part of the root schema that `#/$defs/Name` names; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for key in reference[2:].split("/"):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def find_close(text: str, closing: str, start: int, *, is_end: bool) -> tuple[int, int] | None:
    """Where the text in front of a closing tag ends, and where the tag does; None if it needs more text. At the end of
    the reply the tag may be missing."""
    end = text.find(closing, start)
    if end < 0:
        return (len(text), len(text)) if is_end else None
    return end, end + len(closing)


def find_json_end(text: str, start: int) -> int | None:
    """The position after the JSON object or array at `start`; None if it is incomplete. Raises ValueError if brackets
    do not match."""
    closers: list[str] = []
    for token in _JSON_TOKEN.finditer(text, start):
        if token.group() == '"':  # a string that has not ended
            return None
        if token.group() in _CLOSERS:
            closers.append(_CLOSERS[token.group()])
        elif token.group() in ("]", "}"):
            if not closers or closers.pop() != token.group():
                raise ValueError("brackets do not match")
            if not closers:
                return token.end()
    return None


_CLOSERS = {"{": "}", "[": "]"}
_JSON_TOKEN = re.compile(r'[\[\]{}]|"[^"\\]*(?:\\.[^"\\]*)*"|"', re.DOTALL)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
