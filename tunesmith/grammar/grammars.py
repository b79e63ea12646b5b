"""Grammars as rules in llguidance's Lark notation, built from what clients send: schemas, patterns, choices, tools.

Whitespace in JSON is free up to a limit, as a model that may write it without end sometimes does. Tags that are one
token of the vocabulary, such as <tool_call>, are named by their ids, because text never matches these tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.grammar.llguidance_import import load_llguidance

JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\t]{0,32}"}
SPACE = r"/[ \n]{0,2}/"
"""Whitespace between the parts of a tool call."""
START = re.compile(r"^start\s*:", re.MULTILINE)
"""The first rule of a grammar."""
REPLY, TEXT, CALLS, CALL = (f"tunesmith_{name}" for name in ("reply", "text", "calls", "call"))
"""Names of rules that a client's grammar will hardly have."""
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

    The tags are terms (`write_tag`). With `think_open` the reasoning is optional and starts with it; without, the
    prompt has opened it.
    """
    reasoning = f"/(.|\\n)*/ {think_close} /\\n{{0,4}}/"
    start = f"{reasoning} {REPLY}" if think_open is None else f"({think_open} {reasoning})? {REPLY}"
    return f"start: {start}\n{START.sub(f'{REPLY}:', grammar, count=1)}"


def add_calls(grammar: str, calls: str) -> str:
    """A reply under the grammar, or tool calls under the grammar `calls`."""
    rules = [START.sub(f"{name}:", each, count=1) for name, each in ((TEXT, grammar), (CALLS, calls))]
    return "\n".join([f"start: {TEXT} | {CALLS}", *rules])


@dataclass(frozen=True, slots=True, kw_only=True)
class HermesFormat:
    """Texts and terms (`write_tag`) of a call `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

    call_start: str
    """From the tag to the name, both excluded."""
    call_middle: str
    """Between the name and the arguments."""
    open_tag: str
    close_tag: str


def build_hermes_grammar(
    tools: Sequence[Mapping[str, Any]], call: HermesFormat, *, is_single: bool, after: str | None = None
) -> str:
    """Calls of the tools with arguments that are valid under their schemas; one call if `is_single`.

    The reply has already started: `after` is the name of the tool up to whose arguments it goes, or empty if it goes up
    to the name of the first call; None: it has not started.
    """
    functions = [tool["function"] for tool in tools]
    rules = [f"{CALL}_arguments{index}: {_write_arguments(each)}" for index, each in enumerate(functions)]
    names = [quote(json.dumps(each["name"], ensure_ascii=False)[1:-1] + call.call_middle) for each in functions]
    calls = " | ".join(f"{name} {SPACE} {CALL}_arguments{index}" for index, name in enumerate(names))
    end = f'{SPACE} "}}" {SPACE} {call.close_tag}'
    whole = f"{call.open_tag} {quote(call.call_start)} {CALL} {end}"
    first = whole if after is None else f"{CALL} {end}"
    if after:
        index = next(index for index, each in enumerate(functions) if each["name"] == after)
        first = f"{SPACE} {CALL}_arguments{index} {end}"
    more = "" if is_single else f" ({SPACE} {whole})*"
    return "\n".join([f"start: {first}{more}", f"{CALL}: {calls}", *rules])


def write_tag(text: str, token_id: int | None) -> str:
    """A term for a tag: its token, if it is one, else its text."""
    return quote(text) if token_id is None else f"<[{token_id}]>"


def quote(text: str) -> str:
    """A term for text."""
    return json.dumps(text, ensure_ascii=False)


def _write_arguments(function: Mapping[str, Any]) -> str:
    """A term for the arguments of a tool; keywords that no grammar expresses are refused for `strict` tools only."""
    return _write_json(function.get("parameters") or ANY_OBJECT, is_lenient=not function.get("strict"))


def _write_json(schema: Mapping[str, Any], *, is_lenient: bool = False) -> str:
    """A term for a JSON value."""
    options = JSON_OPTIONS | {"lenient": is_lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"
