"""Constraints on the text of a reply: the fields that set them, and the grammar that they become.

`response_format` is the OpenAI API's; `structured_outputs` and `guided_*` are vLLM's. With `tool_choice`, the rest of a
forced tool call is constrained to the names and schemas of the tools; with tools of free choice, a reply in a
`response_format` may be tool calls instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tunesmith.chat.call_probe import PROBE_CALL_ID
from tunesmith.chat.parsers import HERMES, MISTRAL
from tunesmith.chat.parsers.call_format import resolve_tool
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
from tunesmith.rollout.openai_server.fields import RequestError

KINDS = ("json", "json_object", "regex", "choice", "grammar")
"""Fields of `structured_outputs`, one of which may be set; `guided_<kind>` are the same."""
ARGUMENTS_END = re.compile(r'^"\s*\}')
"""What closes the last argument of a rendered call, and its arguments."""
GUIDED = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """What the text of a reply must be."""

    param: str
    """The request field that sets it."""
    build_grammar: Callable[[], str]


def parse_constraint(body: Mapping[str, Any]) -> Constraint | None:
    """The constraint that a request sets in one of its fields."""
    found = [_parse_response_format(body.get("response_format")), _parse_structured(body.get("structured_outputs"))]
    found += [_parse_kind(kind, body.get(f"guided_{kind}"), param=f"guided_{kind}") for kind in GUIDED]
    constraints = [each for each in found if each is not None]
    if len(constraints) > 1:
        params = " and ".join(each.param for each in constraints)
        raise RequestError(f"{params} both constrain the reply: give one", param=constraints[1].param)
    return constraints[0] if constraints else None


def _parse_response_format(raw: Any) -> Constraint | None:
    param = "response_format"
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise RequestError("response_format must be an object with a type", param=param)
    kind = raw.get("type")
    _check_keys(raw, ("type", "json_schema") if kind == "json_schema" else ("type",), where=param, param=param)
    if kind is None or kind == "text":
        return None
    if kind == "json_object":
        return _parse_kind("json", ANY_OBJECT, param=param)
    if kind == "json_schema":
        wrapper = raw.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if not (isinstance(wrapper, dict) and isinstance(schema, dict)):
            raise RequestError("response_format.json_schema.schema must be a JSON schema", param=param)
        allowed = ("name", "description", "schema", "strict")
        _check_keys(wrapper, allowed, where="response_format.json_schema", param=param)
        return _parse_kind("json", schema, param=param)
    raise RequestError(f"response_format.type={kind!r}; allowed: text, json_object, json_schema", param=param)


def _check_keys(given: Mapping[str, Any], allowed: Sequence[str], *, where: str, param: str) -> None:
    """Raise RequestError for a key without effect, such as a schema beside type json_object."""
    for key, value in given.items():
        if key not in allowed and value is not None:
            raise RequestError(f"{where} has {key!r}; with this type it has only {', '.join(allowed)}", param=param)


def _parse_structured(raw: Any) -> Constraint | None:
    param = "structured_outputs"
    if raw is None:
        return None
    fields = {key: value for key, value in raw.items() if value is not None} if isinstance(raw, dict) else {}
    if len(fields) != 1 or not fields.keys() <= set(KINDS):
        raise RequestError(f"structured_outputs must be an object with one of {', '.join(KINDS)}", param=param)
    [(kind, value)] = fields.items()
    if kind == "json_object":
        return _parse_kind("json", ANY_OBJECT, param=param) if value is True else None
    return _parse_kind(kind, value, param=param)


def _parse_kind(kind: str, value: Any, *, param: str) -> Constraint | None:
    if value is None:
        return None
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
            raise RequestError(f"{param} must be a list of non-empty texts", param=param)
        return Constraint(param=param, build_grammar=lambda: build_choice_grammar(value))
    if kind == "json":
        schema = _load_schema(value, param=param)
        return Constraint(param=param, build_grammar=lambda: build_json_grammar(schema))
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param} must be non-empty text", param=param)
    build = build_regex_grammar if kind == "regex" else build_rule_grammar
    return Constraint(param=param, build_grammar=lambda: build(value))


def _load_schema(value: Any, *, param: str) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RequestError(f"{param} is not JSON: {error}", param=param) from error
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be a JSON schema", param=param)
    return value


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
    with _errors_of(constraint):
        grammar = constraint.build_grammar()
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


def constrain_text(constraint: Constraint) -> str:
    """The grammar of a text completion."""
    with _errors_of(constraint):
        return constraint.build_grammar()


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


@contextmanager
def _errors_of(constraint: Constraint) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RequestError(str(error), param=constraint.param) from error
