"""Grammars as rules in llguidance's Lark notation, built from what clients send: schemas, patterns, choices, tools.

Whitespace in JSON is free up to a limit, as a model that may write it without end sometimes does. Tags that are one
token of the vocabulary, such as <tool_call>, are named by their ids, because text never matches these tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.grammar.tagged_arguments import ArgumentTexts, TaggedArguments
from tunesmith.grammar.terms import SPACE, load_llguidance, quote, write_json, write_tag

CALL_ID = "/[a-zA-Z0-9]{9}/"
START = re.compile(r"""//.*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|\bstart\b""")
"""The name of the first rule of a grammar, and texts that may spell it: comments, strings, regular expressions."""
THINK, REPLY, TEXT, CALLS, CALL = (f"tunesmith_{name}" for name in ("think", "reply", "text", "calls", "call"))
"""Names of rules that a client's grammar will hardly have."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


def build_json_grammar(schema: Mapping[str, Any]) -> str:
    """A JSON value that is valid under a schema."""
    return f"start: {write_json(schema)}"


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


def rename_start(grammar: str, name: str) -> str:
    """The grammar with another name for its first rule, which may refer to itself."""
    return START.sub(lambda found: name if found.group() == "start" else found.group(), grammar)


def add_reasoning(grammar: str, *, think_open: str | None, think_close: str) -> str:
    """The grammar after free reasoning that ends in `think_close`.

    The tags are terms (`write_tag`). With `think_open` the reasoning is optional and starts with it; without, the
    prompt has opened it.
    """
    reasoning = f"{THINK} /\\n{{0,4}}/"
    start = f"{reasoning} {REPLY}" if think_open is None else f"({think_open} {reasoning})? {REPLY}"
    # A token ends the text before it; a tag that is text would be read on as reasoning.
    think = f"{THINK}{'' if think_close.startswith('<[') else '[lazy]'}: /(.|\\n)*/ {think_close}"
    return "\n".join([f"start: {start}", think, rename_start(grammar, REPLY)])


def add_calls(grammar: str, calls: str) -> str:
    """A reply under the grammar, or tool calls under the grammar `calls`."""
    return "\n".join([f"start: {TEXT} | {CALLS}", rename_start(grammar, TEXT), rename_start(calls, CALLS)])


def add_channels(grammar: str, calls: str | None, *, write: Callable[[str], str]) -> str:
    """A reply of harmony: an optional `analysis`, then a `final` message under the grammar, or calls."""
    analysis = f"({write('<|channel|>analysis<|message|>')} /(.|\\n)*/ {write('<|end|><|start|>assistant')})?"
    final = f"{write('<|channel|>final<|message|>')} {TEXT}"
    rules = [rename_start(grammar, TEXT)] + ([] if calls is None else [rename_start(calls, CALLS)])
    return "\n".join([f"start: {analysis} ({final}{'' if calls is None else f' | {CALLS}'})", *rules])


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTexts:
    """Texts of a tool call, such as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

    start: str
    """From the start of the block to the name."""
    middle: str
    """Between the name and the arguments, without whitespace at its end."""
    end: str
    """After the arguments."""
    tokens: Mapping[str, int]
    """Parts of these texts that are one token each -> its id."""
    call_id: str | None = None
    """Part of these texts that stands for the id of the call: nine letters or digits."""
    is_repeatable: bool = True
    """A reply with several calls repeats the whole text."""
    arguments: ArgumentTexts | None = None
    """Texts of one argument; None: the arguments are a JSON object."""

    def write(self, text: str) -> str:
        """Terms for a part of a call."""
        marks = sorted((*self.tokens, *filter(None, [self.call_id])), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
        terms = (CALL_ID if part == self.call_id else write_tag(part, self.tokens.get(part)) for part in parts if part)
        return " ".join(terms)

    def write_name(self, name: str) -> str:
        """Terms for the name of a tool and what separates it from the arguments."""
        escaped = json.dumps(name, ensure_ascii=False)[1:-1] if self.arguments is None else name
        return self.write(escaped + self.middle)

    def split_text(self, text: str) -> tuple[str, str]:
        """The text up to the first part that is one token, and the rest."""
        first = min((index for index in map(text.find, self.tokens) if index >= 0), default=len(text))
        return text[:first], text[first:]

    def build_argument_rules(self, function: Mapping[str, Any], index: int) -> list[str]:
        """Rules of a tool's arguments; keywords that no grammar expresses are refused for `strict` tools only."""
        rule, schema = f"{CALL}_arguments{index}", {**(function.get("parameters") or {}), **ANY_OBJECT}
        is_lenient = not function.get("strict")
        if self.arguments is None:
            return [f"{rule}: {write_json(schema, is_lenient=is_lenient)}"]
        arguments = TaggedArguments(
            label=f"{CALL.upper()}{index}", texts=self.arguments, write=self.write, split_text=self.split_text,
            is_lenient=is_lenient,
        )  # fmt: skip
        return arguments.build_rules(schema, rule=rule)


def build_call_grammar(
    tools: Sequence[Mapping[str, Any]], call: CallTexts, *, is_single: bool, after: str | None = None
) -> str:
    """Calls of the tools with arguments that are valid under their schemas; one call if `is_single`.

    The reply has already started: `after` is the name of the tool up to whose arguments it goes, or empty if it goes up
    to the name of the first call; None: it has not started.
    """
    functions = [tool["function"] for tool in tools]
    rules = [rule for index, each in enumerate(functions) for rule in call.build_argument_rules(each, index)]
    names = [call.write_name(each["name"]) for each in functions]
    calls = " | ".join(f"{name} {SPACE} {CALL}_arguments{index}" for index, name in enumerate(names))
    parts = filter(None, re.split(r"(\s+)", call.end))
    end = " ".join([SPACE, *(SPACE if part.isspace() else call.write(part) for part in parts)])
    whole = f"{call.write(call.start)} {CALL} {end}"
    first = whole if after is None else f"{CALL} {end}"
    if after:
        index = next(index for index, each in enumerate(functions) if each["name"] == after)
        first = f"{SPACE} {CALL}_arguments{index} {end}"
    more = "" if is_single or not call.is_repeatable else f" ({SPACE} {whole})*"
    return "\n".join([f"start: {first}{more}", f"{CALL}: {calls}", *rules])
