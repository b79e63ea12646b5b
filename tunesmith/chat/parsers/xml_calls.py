"""Tool calls with one tag for each argument: Qwen3-Coder and GLM-4.5/4.6.

Both write strings as they are and other values as JSON, so a value is read with the type that the tool's schema gives
its parameter. A value without a schema is JSON if it can be decoded, else text.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tunesmith.chat.parsers.call_format import (
    NAME_PATTERN,
    Block,
    CallFormat,
    ReadCall,
    Tools,
    build_call,
    find_close,
    find_parameters,
    load_json,
)
from tunesmith.chat.parsers.hermes import CALL_CLOSE, CALL_OPEN

FUNCTION_OPEN, FUNCTION_CLOSE = "<function=", "</function>"
GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
"""Python's constants: templates write them with the `string` filter."""

_QWEN_BODY = re.compile(
    rf"(?:{CALL_OPEN}\s*)?{FUNCTION_OPEN}({NAME_PATTERN})>\s*((?:<parameter=[^>\n]+>(?>.*?</parameter>)\s*)*){FUNCTION_CLOSE}",
    re.DOTALL,
)
_QWEN_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_GLM_BODY = re.compile(
    rf"\s*({NAME_PATTERN})\s*((?:<arg_key>[^<]*</arg_key>\s*(?><arg_value>.*?</arg_value>)\s*)*)", re.DOTALL
)
_GLM_ARGUMENT = re.compile(r"<arg_key>\s*([^<]*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),), "object": (dict,),
    "array": (list,), "string": (),
}  # fmt: skip
"""JSON schema types -> types of decoded values; strings are not decoded."""


def read_qwen(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    """One call; the model may leave out the outer `<tool_call>`."""
    malformed = Block(length=len(CALL_OPEN if text.startswith(CALL_OPEN) else FUNCTION_OPEN))
    after = 0
    while (end := text.find(FUNCTION_CLOSE, after)) >= 0:
        after = end + len(FUNCTION_CLOSE)
        rest = text[after:].lstrip()
        if CALL_CLOSE.startswith(rest) and rest != CALL_CLOSE and not is_end:
            return None
        is_closed = rest.startswith(CALL_CLOSE)
        found = _QWEN_BODY.fullmatch(text, 0, after)
        call = None
        if found is not None:
            call = _build_call(found.group(1), _QWEN_PARAMETER.findall(found.group(2)), tools)
        if call is not None:
            length = len(text) - len(rest) + len(CALL_CLOSE) if is_closed else after
            return Block(length=length, calls=(call,))
        if is_closed or text.startswith(FUNCTION_OPEN):
            return malformed
    return malformed if is_end else None


def read_glm(text: str, tools: Tools, *, is_end: bool) -> Block | None:
    ends = find_close(text, CALL_CLOSE, len(CALL_OPEN), is_end=is_end)
    if ends is None:
        return None
    body_end, length = ends
    found = _GLM_BODY.fullmatch(text, len(CALL_OPEN), body_end)
    arguments = [] if found is None else _GLM_ARGUMENT.findall(found.group(2))
    call = None if found is None else _build_call(found.group(1), arguments, tools)
    is_cut = body_end == length and not arguments  # without a closing tag, the name alone may be incomplete
    return Block(length=len(CALL_OPEN)) if call is None or is_cut else Block(length=length, calls=(call,))


def _build_call(name: str, arguments: Iterable[tuple[str, str]], tools: Tools) -> ReadCall | None:
    schemas = find_parameters(tools, name)
    return build_call(name, {key: convert_argument(text, schemas.get(key)) for key, text in arguments})


def convert_argument(text: str, schema: Any) -> Any:
    """The value of an argument: of a type in the schema if possible, else the text."""
    types = _list_types(schema)
    if types == {"string"}:
        return text
    try:
        value = PYTHON_CONSTANTS[text.strip()] if text.strip() in PYTHON_CONSTANTS else load_json(text)
    except ValueError:
        value = _read_literal(text) if types & {"object", "array"} else text
    if not types:
        return text if isinstance(value, str) else value
    return value if any(type(value) in _KINDS[kind] for kind in types) else text


def _read_literal(text: str) -> Any:
    """A Python list or dict that the model wrote instead of JSON; the text if it is neither."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _list_types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for choice in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        types |= _list_types(choice)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not types and isinstance(values, list) and all(isinstance(each, str) for each in values):
        types = {"string"}
    return types & _KINDS.keys()


QWEN3_CODER = CallFormat(
    name="qwen3_coder",
    openers=(CALL_OPEN, FUNCTION_OPEN),
    template_tags=(FUNCTION_OPEN,),
    close=CALL_CLOSE,
    arguments_start=r"<parameter=a>",
    argument_ends=("</parameter>", CALL_CLOSE),
    read_block=read_qwen,
)
GLM = CallFormat(
    name="glm",
    openers=(CALL_OPEN,),
    template_tags=("<arg_key>",),
    close=CALL_CLOSE,
    markup=GLM_TAGS,
    arguments_start=r"<arg_key>a</arg_key>",
    argument_ends=("</arg_value>", CALL_CLOSE),
    read_block=read_glm,
)
