"""Grammars as rules in llguidance's Lark notation, built from what clients send: schemas, patterns, choices, tools.

Whitespace in JSON is free up to a limit, as a model that may write it without end sometimes does. Tags that are one
token of the vocabulary, such as <tool_call>, are named by their ids, because text never matches these tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.grammar.llguidance_import import load_llguidance

JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,32}"}
SPACE = r"/[ \n]{0,2}/"
"""Whitespace between the parts of a tool call."""
START = re.compile(r"^start\s*:", re.MULTILINE)
"""The first rule of a grammar."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def build_json_grammar(schema: Mapping[str, Any]) -> str:
    """A JSON value that is valid under a schema."""
    return f"start: {_write_json(schema)}"


def build_regex_grammar(pattern: str) -> str:
    """Text that a regular expression (Rust's syntax) matches as a whole."""
    [part] = json.loads(load_llguidance().LLMatcher.grammar_from_regex(pattern))["grammars"]
    return str(part["lark_grammar"])


def build_choice_grammar(choices: Sequence[str]) -> str:
    """One of several texts."""
    return f"start: {' | '.join(map(quote, choices))}"


def build_rule_grammar(text: str) -> str:
    """A grammar in Lark's or in llama.cpp's (GBNF) notation; ValueError if it is neither."""
    return str(load_llguidance().grammar_from("gbnf", text)) if "::=" in text else text


def add_reasoning(grammar: str, *, think_open: str | None, think_close: str) -> str:
    """The grammar after free reasoning that ends in `think_close`.

    The tags are terms of a rule (`write_tag`). With `think_open` the reasoning is optional and starts with it; without,
    it has been opened by the prompt.
    """
    reasoning = f"/(.|\\n)*/ {think_close} /\\n{{0,4}}/"
    start = f"{reasoning} reply" if think_open is None else f"({think_open} {reasoning})? reply"
    return f"start: {start}\n{START.sub('reply:', grammar, count=1)}"


def build_hermes_grammar(
    tools: Sequence[Mapping[str, Any]],
    *,
    name: str | None,
    call_start: str,
    call_middle: str,
    is_single: bool,
    tags: Mapping[str, str],
) -> str:
    """The rest of a reply that starts with a tool call: `{"name": ..., "arguments": ...}` between tags.

    The reply starts with `call_start`, and `name` and `call_middle` if the tool is named; after the first call come
    further ones unless `is_single`. `tags` are the terms (`write_tag`) of the tags <tool_call> and </tool_call>.
    """
    functions = [tool["function"] for tool in tools]
    rules = [f"arguments{index}: {_write_json(_get_schema(function))}" for index, function in enumerate(functions)]
    calls = " | ".join(
        f"{_quote_name(function['name'], call_middle)} {SPACE} arguments{index}"
        for index, function in enumerate(functions)
    )
    open_tag, close_tag = tags.values()
    open_text = next(iter(tags))
    end = f'{SPACE} "}}" {SPACE} {close_tag}'
    first = "call"
    if name is not None:
        index = next(index for index, function in enumerate(functions) if function["name"] == name)
        first = f"{SPACE} arguments{index}"
    more = "" if is_single else f" ({SPACE} {open_tag} {quote(call_start.removeprefix(open_text))} call {end})*"
    return "\n".join([f"start: {first} {end}{more}", f"call: {calls}", *rules])


def write_tag(text: str, token_ids: Mapping[str, int]) -> str:
    """A term for a tag: its token, if it is one, else its text."""
    return f"<[{token_ids[text]}]>" if text in token_ids else quote(text)


def quote(text: str) -> str:
    """A term for text."""
    return json.dumps(text, ensure_ascii=False)


def _quote_name(name: str, call_middle: str) -> str:
    return quote(json.dumps(name, ensure_ascii=False)[1:-1] + call_middle)


def _get_schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or ANY_OBJECT


def _write_json(schema: Mapping[str, Any]) -> str:
    """A term for a JSON value; options in the schema override ours."""
    options = JSON_OPTIONS | schema.get("x-guidance", {})
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"
