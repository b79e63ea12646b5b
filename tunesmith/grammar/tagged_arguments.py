"""Grammars of arguments with a tag for each, as Qwen3-Coder and GLM write them: strings as they are, the rest as JSON.

Input: a tool's schema, whose references are resolved, and the texts around names and values. Output: rules. What the
grammar allows, the reply parser reads as a value that is valid under the parameter's schema. Arguments come in the
order of the schema. A string is one terminal together with the text that ends it, because the lexer is greedy and does
not backtrack. What is inside of JSON is not searched for closing tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.grammar.terms import SPACE, load_llguidance, quote, write_json

NAME = re.compile(r"[^<>\s](?:[^<>\n]*[^<>\s])?")
"""Names of arguments that both formats can write."""
FREE_NAME = "/[a-zA-Z_][a-zA-Z0-9_.-]{0,63}/"
"""Names of arguments of a tool without a schema."""
ANY_TEXT = "/(?s:.*)/"
BLANK = r"[\s\x1c-\x1f]*"
READ_AS: Mapping[str, str] = {
    "integer": rf"{BLANK}[-0-9][-+0-9.eE]*{BLANK}", "number": rf"{BLANK}[-0-9][-+0-9.eE]*{BLANK}",
    "boolean": rf"{BLANK}(true|false|True|False){BLANK}", "null": rf"{BLANK}(null|None){BLANK}",
    "array": rf"{BLANK}[\[{{(](?s:.*)", "object": rf"{BLANK}[\[{{(](?s:.*)",
}  # fmt: skip
"""JSON type -> pattern of all texts that are read as a value of this type where the schema allows it and text."""
SCALARS: Mapping[str, str] = {
    "integer": r"/-?(0|[1-9][0-9]*)/", "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/",
    "boolean": '("true" | "false")', "null": '"null"',
}  # fmt: skip
"""JSON type -> the texts of its values."""
ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema", "$id",
    "$defs", "definitions", "strict",
})  # fmt: skip
"""Keywords that allow every value."""
OBJECT_KEYWORDS = frozenset({"type", "properties", "required", "additionalProperties"})
STRING_KEYWORDS = frozenset({"type", "pattern", "minLength", "maxLength"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentTexts:
    """Texts of an argument, such as `<parameter=`, `>` and `</parameter>` with the line breaks around the value."""

    start: str
    """Before the name."""
    middle: str
    """Between the name and the value."""
    end: str
    """After the value."""
    excluded: tuple[str, ...]
    """Texts that end an argument or a call for the parser, so that no value contains them."""
    read: Callable[[str, Any], Any]
    """The value that the parser reads from a text, given the parameter's schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    """Writes the rules of one tool's arguments."""

    label: str
    """Prefix of the names of terminals, in upper case."""
    texts: ArgumentTexts
    write: Callable[[str], str]
    """Terms for a text that may contain tags."""
    split_text: Callable[[str], tuple[str, str]]
    """Divides a text in front of its first tag that is one token."""
    is_lenient: bool
    """Keywords that the grammar cannot express are not enforced; else they raise ValueError."""

    def build_rules(self, schema: Mapping[str, Any], *, rule: str) -> list[str]:
        """A rule with the given name, and the terminals that it uses."""
        self._check_keywords(schema, OBJECT_KEYWORDS, "the arguments")
        terminals: list[str] = []
        required = set(schema.get("required") or ())
        properties = schema.get("properties")
        extra = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping) and not required:
            if extra is False:
                return [f'{rule}: ""']
            value = self._write_value(extra if isinstance(extra, Mapping) else {}, "an argument", terminals, schema)
            texts = self.texts
            body = f"({self.write(texts.start)} {FREE_NAME} {self.write(texts.middle)} {value} {SPACE})*"
            return [f"{rule}: {body}", *terminals]
        properties = properties or {}
        parts = []
        for name in dict.fromkeys([*properties, *sorted(required)]):
            given = properties.get(name, True)
            if given is False and name not in required:
                continue
            if not NAME.fullmatch(name):
                raise ValueError(f"the format of this model's tool calls cannot write an argument named {name!r}")
            value = self._write_value(given if isinstance(given, Mapping) else {}, name, terminals, schema)
            part = f"{self.write(self.texts.start + name + self.texts.middle)} {value} {SPACE}"
            parts.append(part if name in required else f"({part})?")
        return [f"{rule}: {' '.join(parts) or quote('')}", *terminals]

    def _write_value(self, schema: Mapping[str, Any], name: str, terminals: list[str], root: Mapping[str, Any]) -> str:
        """Terms for a value and the text after it; adds the terminals that they use."""
        branches = list(self._iterate_branches(schema, name))
        kinds = {kind for branch in branches for kind in _list_kinds(branch)}
        if "string" not in kinds and "any" not in kinds:
            definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
            value = write_json({**definitions, **schema}, is_lenient=self.is_lenient)
            return f"{value} {self.write(self.texts.end)}"
        choices = [text for branch in branches for text in self._list_choices(branch, schema, kinds, name)]
        if not choices:
            raise ValueError(f"the format of this model's tool calls can write no value of the argument {name!r}")
        text, rest = self.split_text(self.texts.end)
        terminal = f"{self.label}_{len(terminals)}"
        terminals.append(f"{terminal}: ({' | '.join(choices)}) {quote(text) if text else ''}".rstrip())
        return f"{terminal} {self.write(rest) if rest else ''}".rstrip()

    def _iterate_branches(self, schema: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
        """The alternatives of a schema, each with one type, or with the values that it allows."""
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if alternatives:
            self._check_keywords(schema, frozenset({"anyOf", "oneOf", "type"}), name)
            for each in alternatives:
                yield from self._iterate_branches(each if isinstance(each, Mapping) else {}, name)
        elif isinstance(schema.get("type"), list | tuple) and _find_values(schema) is None:
            yield from ({**schema, "type": kind} for kind in schema["type"])
        else:
            yield schema

    def _list_choices(
        self, branch: Mapping[str, Any], schema: Mapping[str, Any], kinds: set[str], name: str
    ) -> Iterator[str]:
        """Parts of a terminal: the texts of one alternative."""
        if (values := _find_values(branch)) is not None:
            yield from (quote(text) for text in map(_write_choice, values) if self._is_read(text, values, schema))
            return
        kind = branch.get("type", "any")
        if kind in ("string", "any"):
            self._check_keywords(branch, STRING_KEYWORDS if kind == "string" else frozenset(), name)
            others = kinds & READ_AS.keys() if kind == "string" else set()
            yield self._write_text(branch, name, [READ_AS[each] for each in sorted(others)])
        elif kind in SCALARS and branch.keys() <= ANNOTATIONS | {"type"}:
            yield SCALARS[kind]
        elif not self.is_lenient:
            raise ValueError(
                f"the argument {name!r} is either text or a value of type {kind} with keywords, which the format of "
                "this model's tool calls cannot tell apart"
            )

    def _is_read(self, text: str, values: Sequence[Any], schema: Mapping[str, Any]) -> bool:
        read = self.texts.read(text, schema)
        is_value = any(type(read) is type(value) and read == value for value in values)
        return is_value and not any(each in text for each in self.texts.excluded)

    def _write_text(self, branch: Mapping[str, Any], name: str, others: Sequence[str]) -> str:
        """A part of a terminal: text under the keywords of a string, without what would be read in another way."""
        excluded = "|".join(re.escape(each).replace("/", r"\/") for each in self.texts.excluded)
        parts = [ANY_TEXT, f"~/(?s:.*)({excluded})(?s:.*)/", *(f"~/{each}/" for each in dict.fromkeys(others))]
        low, high = branch.get("minLength"), branch.get("maxLength")
        if low is not None or high is not None:
            parts.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
        if branch.get("pattern") is not None:
            pattern = _write_pattern(branch["pattern"])
            if pattern is None:
                raise ValueError(f"the pattern {branch['pattern']!r} of the argument {name!r} is not supported")
            parts.append(pattern)
        return f"({' & '.join(parts)})"

    def _check_keywords(self, schema: Mapping[str, Any], known: frozenset[str], name: str) -> None:
        unknown = sorted(schema.keys() - known - ANNOTATIONS)
        if unknown and not self.is_lenient:
            raise ValueError(
                f"{', '.join(unknown)} of {name!r} cannot be enforced in the format of this model's tool calls; leave "
                "it out, or declare the tool without strict"
            )


def _find_values(branch: Mapping[str, Any]) -> Sequence[Any] | None:
    """The only values that a branch allows; None if it allows all of a type."""
    return branch["enum"] if "enum" in branch else [branch["const"]] if "const" in branch else None


def _list_kinds(branch: Mapping[str, Any]) -> set[str]:
    """JSON types of a branch: `any` if it has none."""
    if (values := _find_values(branch)) is not None:
        return {"string" if isinstance(value, str) else "other" for value in values}
    return {str(branch.get("type", "any"))}


def _write_choice(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write_pattern(pattern: Any) -> str | None:
    """A term for texts in which a pattern of JSON Schema is found; None if llguidance does not support it."""
    if not isinstance(pattern, str):
        return None
    has_start, has_end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    if (has_start or has_end) and _has_alternatives(pattern):
        return None
    body = pattern[has_start : len(pattern) - has_end].replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")
    term = f"/{'' if has_start else '(?s:.*)'}({body}){'' if has_end else '(?s:.*)'}/"
    is_error, _ = load_llguidance().LLMatcher.validate_grammar_with_warnings(f"start: {term}")
    return None if is_error else term


def _has_alternatives(pattern: str) -> bool:
    """Whether a pattern has a `|` outside of parentheses, so that an anchor belongs to one alternative only."""
    rest = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)
    while "(" in rest and (shorter := re.sub(r"\([^()]*\)", "", rest)) != rest:
        rest = shorter
    return "|" in rest
