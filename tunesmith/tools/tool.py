"""Tools that agents call: a name, a JSON schema, and an async function.

`tool` builds one from an async function; its type hints and docstring become the schema. `Tool.call` checks the
model's arguments, runs the function under the time limit, and returns a `ToolResult`. What the model did wrong
(arguments, a slow query, `ToolInputError`) is a result that it reads. Every other exception, such as
`ToolUnavailableError`, is a failure of ours: it is raised, and the rollout becomes a `Failure`.

A schema is read in the dialect that its `$schema` names, by default 2020-12; `nullable`, and limits that `true` makes
exclusive, mean what they do in OpenAPI 3.0. 3.0 is no integer: a function with an `int` parameter would receive a
float. `format` is not checked.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Literal, overload

import pydantic
from jsonschema import Draft4Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from tunesmith.tool_log import record_call

EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
CLAUSES: Mapping[str, str] = {
    "const": "be {}",
    "minimum": "be at least {}",
    "maximum": "be at most {}",
    "exclusiveMinimum": "be more than {}",
    "exclusiveMaximum": "be less than {}",
    "minLength": "have at least {} characters",
    "maxLength": "have at most {} characters",
    "minItems": "have at least {} items",
    "maxItems": "have at most {} items",
}
"""What a value must do, by keyword; others have the library's message."""
MAX_MESSAGE_CHARS = 300
Check = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]


class ArgumentChecker:
    """The schema of a tool's arguments, ready to check calls; ValueError if it is not a valid schema."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        standard = validator_for(parameters, default=Draft202012Validator)
        check_schema(parameters, standard)
        adapted = extend(
            standard, validators=adapt_checks(standard.VALIDATORS), type_checker=Draft4Validator.TYPE_CHECKER
        )
        self._validator = adapted(parameters, registry=Registry())
        self._names = tuple(parameters.get("properties", ()))
        self._required = tuple(parameters.get("required", ()))
        self._takes_others = bool(parameters.get("additionalProperties"))

    def find_wrong(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with the arguments: one that is missing, unknown, or of another type or value."""
        for name in self._required:
            if name not in arguments:
                return f"the argument {name!r} is missing; the arguments are {', '.join(self._names)}"
        for name in arguments:
            if name not in self._names and not self._takes_others:
                return f"there is no argument {name[:60]!r}; the arguments are {', '.join(self._names)}"
        try:
            error = next(self._validator.iter_errors(arguments), None)
            return None if error is None else describe(best_match([error]))
        except RecursionError:
            return "the arguments are nested too deeply"
        except (ArithmeticError, ValueError) as error:  # multipleOf of an infinite number, or of NaN
            return f"the arguments have a number that cannot be checked: {error}"


@lru_cache(1024)
def build_checker(schema: str) -> ArgumentChecker:
    """The checker of a schema in JSON. Checking a schema takes milliseconds; each session may build its tools anew."""
    return ArgumentChecker(json.loads(schema))


def check_schema(parameters: Mapping[str, Any], standard: Any) -> None:
    """Raise ValueError for keywords with wrong values, and for references to nothing."""
    for error in standard(standard.META_SCHEMA, format_checker=standard.FORMAT_CHECKER).iter_errors(parameters):
        keyword = error.absolute_path[-1] if error.absolute_path else ""
        if not (keyword in EXCLUSIVE and isinstance(error.instance, bool)):
            place = "/".join(map(str, error.absolute_path))
            raise ValueError(f"{place or 'the schema'}: {error.message[:MAX_MESSAGE_CHARS]}")
    specification = specification_with(standard.META_SCHEMA.get("$schema", ""), default=DRAFT202012)
    root = specification.create_resource(parameters)
    waiting, seen = [(Registry().resolver_with_root(root), root)], set()
    while waiting:
        resolver, resource = waiting.pop()
        if id(resource.contents) in seen or not isinstance(resource.contents, Mapping):
            continue
        seen.add(id(resource.contents))
        waiting += [(resolver.in_subresource(each), each) for each in resource.subresources()]
        if "$ref" in resource.contents:
            try:
                found = resolver.lookup(resource.contents["$ref"])
            except Unresolvable as error:
                raise ValueError(f"$ref {resource.contents['$ref']!r} names no part of the schema") from error
            waiting.append((found.resolver, specification.create_resource(found.contents)))


def adapt_checks(standard: Mapping[str, Check]) -> dict[str, Check]:
    """The checks of keywords that mean more in OpenAPI 3.0."""

    def allow_null(keyword: str) -> Check:
        def check(validator: Any, expected: Any, value: Any, schema: Any) -> Iterable[ValidationError] | None:
            is_allowed = value is None and schema.get("nullable") is True
            return None if is_allowed else standard[keyword](validator, expected, value, schema)

        return check

    def read_boolean(keyword: str) -> Check:
        def check(validator: Any, limit: Any, value: Any, schema: Any) -> Iterable[ValidationError] | None:
            if isinstance(limit, bool):
                limit = schema.get(EXCLUSIVE[keyword]) if limit else None
            return None if limit is None else standard[keyword](validator, limit, value, schema)

        return check

    adapted = {keyword: allow_null(keyword) for keyword in ("type", "enum")}
    return adapted | {keyword: read_boolean(keyword) for keyword in EXCLUSIVE if keyword in standard}


def describe(error: ValidationError) -> str:
    """A sentence that names the argument, as in "the argument 'order'['parts'][0] must be of type string"."""
    first, *rest = error.absolute_path or ("",)
    name = f"the argument {first!r}" + "".join(f"[{each!r:.60}]" for each in rest) if first else "the arguments"
    if error.validator == "required":
        missing = next(each for each in error.validator_value if each not in error.instance)
        return f"{name} has no {missing!r}"
    clauses = list_clauses(list_alternatives(error))
    return f"{name} must {' or '.join(clauses)}" if clauses else f"{name}: {error.message[:MAX_MESSAGE_CHARS]}"


def list_alternatives(error: ValidationError) -> list[ValidationError]:
    """What is wrong in each alternative of a value; the error itself if there are none, or it is inside the value."""
    if error.validator not in ("anyOf", "oneOf") or any(each.path for each in error.context):
        return [error]
    return [leaf for each in error.context for leaf in list_alternatives(each)]


def list_clauses(errors: Iterable[ValidationError]) -> list[str]:
    """What the value must do, an alternative for each error; none if one of them cannot be said in this form."""
    clauses: list[str] = []
    types: dict[str, None] = {}
    for error in errors:
        wanted = error.validator_value
        if error.validator == "type":
            types |= dict.fromkeys([wanted] if isinstance(wanted, str) else wanted)
        elif error.validator == "enum":
            clauses.append(f"be one of {', '.join(map(str, wanted))}")
        elif error.validator in CLAUSES:
            limit = (
                error.schema[EXCLUSIVE[error.validator]] if wanted is True and error.validator != "const" else wanted
            )
            clauses.append(CLAUSES[error.validator].format(limit))
        else:
            return []
    return [*clauses, *([f"be of type {' or '.join(types)}"] if types else [])]


Run = Callable[..., Awaitable["str | ToolResult"]]
"""The function of a tool: keyword arguments in, the text for the model out."""
OpenSession = Callable[[], AbstractAsyncContextManager[Any]]

FailureKind = Literal["", "error", "arguments", "unknown_tool", "timeout", "memory", "output_limit", "call_limit"]
"""Why a call failed; empty if it did not."""
TOOL_NAME = re.compile(r"[A-Za-z_][\w-]*")
RESERVED_NAMES = frozenset({"think", "result", "answer", "tool_call", "tool_response"})
"""Names of tags that have another meaning."""


class ToolInputError(ValueError):
    """The model's call was wrong; raised by a tool's function, and its message is the result of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The text that the model reads, and whether the call succeeded."""

    text: str
    failure: FailureKind = ""
    ms: float = 0.0
    """Wall time of the call."""

    @property
    def ok(self) -> bool:
        return not self.failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool: `run` serves all rollouts; with `open_session`, each rollout has a session with state of its own."""

    name: str
    """Letters, digits, `_` and `-`; also the name of its tag."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    run: Run
    text_argument: str | None = None
    """The argument that the text of a tag is; None reads the text as a JSON object of arguments."""
    timeout_s: float | None = 60.0
    """Seconds after which a call is cancelled, and its result says so; None for tools that limit themselves."""
    max_calls: int | None = None
    """Calls of this tool per rollout; None leaves it to the environment."""
    max_result_chars: int | None = None
    """Characters of a result, of which the middle is left out; None leaves it to the environment."""
    open_session: OpenSession | None = field(default=None, repr=False)
    """Opens the state of one rollout: an async context manager whose value is called in place of `run`. Tools with the
    same `open_session` share it."""
    in_session: Callable[[Any], Run] | None = field(default=None, repr=False)
    """The function of this tool in a session that tools share; None: the session is the function."""
    checker: ArgumentChecker = field(init=False, repr=False, compare=False)
    """Checks arguments against `parameters`."""

    def __post_init__(self) -> None:
        if not TOOL_NAME.fullmatch(self.name) or self.name in RESERVED_NAMES:
            raise ValueError(
                f"{self.name!r} is not a tool name: use letters, digits, '_' and '-', and none of "
                f"{', '.join(sorted(RESERVED_NAMES))}"
            )
        if self.parameters.get("type") != "object":
            raise ValueError(f"the parameters of tool {self.name!r} must be a JSON schema with type: object")
        if self.text_argument is not None and self.text_argument not in self.parameters.get("properties", {}):
            raise ValueError(f"text_argument={self.text_argument!r} is no parameter of tool {self.name!r}")
        try:
            object.__setattr__(self, "checker", build_checker(json.dumps(dict(self.parameters))))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the parameters of tool {self.name!r} are no valid JSON schema: {error}") from error

    @classmethod
    def from_function(cls, function: Run, **settings: Any) -> Tool:
        """A tool of an async function; `settings` are fields that differ from what its signature and docstring say.

        Parameters need type hints that pydantic can turn into a JSON schema. If exactly one parameter is required and
        it is a string, it is the `text_argument`.
        """
        name = settings.pop("name", getattr(function, "__name__", type(function).__name__))
        if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):
            raise ValueError(f"the function of tool {name!r} must be async: define it with `async def`")
        parameters = settings.pop("parameters", None) or build_parameters(function, name)
        settings.setdefault("text_argument", find_text_argument(parameters))
        description = settings.pop("description", None) or " ".join((inspect.getdoc(function) or "").split())
        if not description:
            raise ValueError(f"tool {name!r} has no description: write a docstring, or pass description")
        return cls(name=name, description=description, parameters=parameters, run=function, **settings)

    @property
    def is_stateful(self) -> bool:
        return self.open_session is not None

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as an entry of `tools` in a chat request."""
        return write_schema(self.name, self.description, self.parameters)

    async def call(self, arguments: Mapping[str, Any], *, run: Run | None = None) -> ToolResult:
        """Run the tool once; `run` is the function of a session.

        A branch of a rollout receives the result of its parent's call, or repeats the call if the tool has a session.
        """
        make = partial(self._call, arguments, run)
        describe = attrgetter("text", "failure")  # what the model reads: all but the wall time
        return await record_call(self.name, arguments, make, has_state=run is not None, describe=describe)

    async def _call(self, arguments: Mapping[str, Any], run: Run | None) -> ToolResult:
        started = time.perf_counter()
        wrong = self.checker.find_wrong(arguments)
        if wrong is not None:
            return ToolResult(text=f"Error: {wrong}.", failure="arguments")
        given: str | ToolResult
        limit = asyncio.timeout(self.timeout_s)
        _limit.set((limit, self.timeout_s))
        try:
            async with limit:
                given = await (run or self.run)(**arguments)
        except ToolInputError as error:
            given = ToolResult(text=f"Error: {error}", failure="error")
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"Error: {self.name} took longer than {self.timeout_s:g} s and was stopped."
            given = ToolResult(text=text, failure="timeout")
        if not isinstance(given, str | ToolResult):
            raise TypeError(f"tool {self.name!r} returned {name_kind(given)}; it must return str or ToolResult")
        result = ToolResult(text=given) if isinstance(given, str) else given
        return replace(result, ms=1000 * (time.perf_counter() - started))


def write_schema(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as an entry of `tools` in a chat request."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def name_kind(value: Any) -> str:
    """What a value is that should be text: a part that is none, or the value's type."""
    parts = [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
    kinds = [each.get("type") for each in parts if each.get("type") != "text"]
    return f"a part {kinds[0]!r}" if kinds else type(value).__name__


def hold_time_limit() -> Callable[[], None]:
    """Stop the time limit of the current call, for a tool that waits before it works; the function that is returned,
    called on the event loop, starts the limit from its beginning."""
    limit, timeout_s = _limit.get()
    limit.reschedule(None)

    def start() -> None:
        if timeout_s is not None:
            limit.reschedule(asyncio.get_running_loop().time() + timeout_s)

    return start


_limit: ContextVar[tuple[asyncio.Timeout, float | None]] = ContextVar("tool_time_limit")
"""The time limit of the current call, and its seconds."""


@overload
def tool(function: Run) -> Tool: ...
@overload
def tool(**settings: Any) -> Callable[[Run], Tool]: ...
def tool(function: Run | None = None, **settings: Any) -> Tool | Callable[[Run], Tool]:
    """Decorator: a `Tool` of an async function, as `@tool` or `@tool(timeout_s=5, max_calls=3)`."""
    if function is not None:
        return Tool.from_function(function, **settings)
    return lambda decorated: Tool.from_function(decorated, **settings)


def build_parameters(function: Run, name: str) -> dict[str, Any]:
    """The JSON schema of a function's parameters."""
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"tool {name!r} has the parameter {parameter}: arguments are passed by name")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"parameter {parameter.name!r} of tool {name!r} has no type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    return {
        "type": "object",
        "properties": {},
        **drop_titles(pydantic.create_model(name, **fields).model_json_schema()),
    }


def drop_titles(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without the titles that pydantic writes, of itself and of its properties."""
    kept = {key: value for key, value in schema.items() if key != "title"}
    if isinstance(properties := schema.get("properties"), Mapping):
        kept["properties"] = {
            name: {key: value for key, value in each.items() if key != "title"} if isinstance(each, Mapping) else each
            for name, each in properties.items()
        }
    return kept


def find_text_argument(parameters: Mapping[str, Any]) -> str | None:
    """The one required argument, if it is a text."""
    required, properties = parameters.get("required", ()), parameters.get("properties", {})
    is_text = len(required) == 1 and properties.get(required[0], {}).get("type") == "string"
    return required[0] if is_text else None
