"""Constraints on the text of a reply: the fields that set them, and the grammar that they become.

`response_format` is the OpenAI API's; `structured_outputs` and `guided_*` are vLLM's. With `tool_choice`, the rest of a
forced tool call is constrained to the names and schemas of the tools; with tools of free choice, a reply in a
`response_format` may be tool calls instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.chat.call_probe import PROBE_CALL_ID
from tunesmith.chat.parsers.call_format import load_json, resolve_tool
from tunesmith.chat.parsers.hermes import HERMES
from tunesmith.chat.parsers.json_calls import MISTRAL
from tunesmith.chat.parsers.xml_calls import convert_argument
from tunesmith.chat.renderer import Renderer
from tunesmith.grammar.grammars import (
    ANY_OBJECT,
    CallTexts,
    add_calls,
    add_channels,
    add_reasoning,
    build_call_grammar,
    build_choice_grammar,
    build_json_grammar,
    build_regex_grammar,
    build_rule_grammar,
)
from tunesmith.grammar.tagged_arguments import ArgumentTexts
from tunesmith.grammar.terms import has_llguidance, write_tag
from tunesmith.rollout.openai_server.fields import OBJECT, Fields, Read, RequestError, keep, read_fields, read_object

ARGUMENTS_END = re.compile(r'^"\s*\}')
"""What closes the last argument of a rendered call, and its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What the text of a reply must be."""

    param: str
    """The request field that sets it."""
    build_grammar: Callable[[], str]

    def to_grammar(self) -> str:
        """The grammar; raises RequestError if the constraint has none."""
        try:
            return self.build_grammar()
        except ValueError as error:
            raise RequestError(str(error), param=self.param) from error


def constrain_json(value: Any, name: str) -> Constraint:
    """A JSON schema, or its text."""
    if isinstance(value, str):
        try:
            value = load_json(value)
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a JSON schema")
    schema = value
    return Constraint(param=name.partition(".")[0], build_grammar=lambda: build_json_grammar(schema))


def constrain_choice(value: Any, name: str) -> Constraint:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"{name} must be a list of non-empty texts")
    return Constraint(param=name.partition(".")[0], build_grammar=lambda: build_choice_grammar(value))


def constrain_by(build: Callable[[str], str]) -> Read:
    """A field whose text `build` turns into a grammar."""

    def read(value: Any, name: str) -> Constraint:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be non-empty text")
        return Constraint(param=name.partition(".")[0], build_grammar=lambda: build(value))

    return read


GUIDED: Fields = {
    "json": constrain_json,
    "regex": constrain_by(build_regex_grammar),
    "choice": constrain_choice,
    "grammar": constrain_by(build_rule_grammar),
}
STRUCTURED: Fields = {
    **GUIDED,
    "json_object": lambda value, name: constrain_json(ANY_OBJECT, name) if value is True else None,
}
"""Fields of `structured_outputs`, one of which may be set."""
JSON_SCHEMA: Fields = {"name": keep, "description": keep, "strict": keep, "schema": constrain_json}


def constrain_format(value: Any, name: str) -> Constraint | None:
    """`response_format`."""
    kind = OBJECT(value, name).get("type") or "text"
    if kind not in ("text", "json_object", "json_schema"):
        raise ValueError(f"{name}.type={kind!r}; allowed: text, json_object, json_schema")
    known: dict[str, Read] = {"type": keep}
    if kind == "json_schema":
        given = read_fields(value, known | {"json_schema": read_object(JSON_SCHEMA)}, name)
        schema: Constraint | None = given.get("json_schema", {}).get("schema")
        return schema or constrain_json(None, f"{name}.json_schema.schema")
    read_fields(value, known, name)
    return None if kind == "text" else constrain_json(ANY_OBJECT, name)


def constrain_structure(value: Any, name: str) -> Constraint | None:
    """`structured_outputs`."""
    given = {key: each for key, each in OBJECT(value, name).items() if each is not None}
    if len(given) != 1 or not given.keys() <= STRUCTURED.keys():
        raise ValueError(f"{name} must be an object with one of {', '.join(STRUCTURED)}")
    return next(iter(read_fields(given, STRUCTURED, name).values()), None)


CONSTRAINT_FIELDS: Fields = {
    "response_format": constrain_format,
    "structured_outputs": constrain_structure,
    **{f"guided_{kind}": read for kind, read in GUIDED.items()},
}


def choose_constraint(given: Mapping[str, Any]) -> Constraint | None:
    """The constraint that a request sets in one of its fields."""
    constraints = [given[name] for name in CONSTRAINT_FIELDS if name in given]
    if len(constraints) > 1:
        params = " and ".join(each.param for each in constraints)
        raise RequestError(f"{params} both constrain the reply: give one", param=constraints[1].param)
    return constraints[0] if constraints else None


def constrain_reply(
    constraint: Constraint,
    renderer: Renderer,
    prompt_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]],
    *,
    is_single_call: bool,
) -> str:
    """The grammar of a chat reply whose text is constrained; `tools` may be called instead.

    Reasoning is free: the constraint starts after it if the prompt opens it, or if the model decides whether to reason.
    """
    grammar = constraint.to_grammar()
    texts = _describe_calls(renderer)
    calls = _build_calls(tools, texts, is_single=is_single_call) if tools else None
    if renderer.is_harmony:
        return add_channels(grammar, calls, write=texts.write)
    if calls is not None:
        grammar = add_calls(grammar, calls)
    tags = renderer.reasoning_tags
    think_open, think_close = (write_tag(tag, renderer.added_tokens.get(tag)) for tag in (tags.opening, tags.closing))
    if renderer.is_reasoning_open(prompt_ids):
        return add_reasoning(grammar, think_open=None, think_close=think_close)
    if renderer.may_reason(prompt_ids):
        return add_reasoning(grammar, think_open=think_open, think_close=think_close)
    return grammar


def constrain_call(
    tools: Sequence[Mapping[str, Any]], renderer: Renderer, *, name: str | None, is_single_call: bool
) -> str:
    """The grammar of the rest of a reply whose tool call has been started.

    Empty without llguidance: then only the prefix of the call is forced.
    """
    if not has_llguidance():
        return ""
    return _build_calls(tools, _describe_calls(renderer), is_single=is_single_call, after=name or "")


def _build_calls(
    tools: Sequence[Mapping[str, Any]], texts: CallTexts, *, is_single: bool, after: str | None = None
) -> str:
    if texts.arguments is not None:
        tools = [resolve_tool(tool) for tool in tools]
    try:
        return build_call_grammar(tools, texts, is_single=is_single, after=after)
    except ValueError as error:
        raise RequestError(str(error), param="tools") from error


def _describe_calls(renderer: Renderer) -> CallTexts:
    """The texts of a call as the model's template writes it."""
    call = renderer.rendered_call
    end = ARGUMENTS_END.sub("", call.tail, count=1) if call.argument is None else call.tail
    is_block_per_call = call.call_format is MISTRAL and not end.strip()
    arguments = None
    if call.argument is not None:
        start, middle, close = call.argument
        end = call.tail.removeprefix(close)
        arguments = ArgumentTexts(
            start=start, middle=middle, end=close, excluded=call.call_format.argument_ends, read=convert_argument
        )
    return CallTexts(
        start=call.start,
        middle=call.separator,
        end=end,
        tokens=renderer.added_tokens,
        call_id=PROBE_CALL_ID,
        is_repeatable=call.call_format is HERMES or is_block_per_call or arguments is not None,
        arguments=arguments,
    )
