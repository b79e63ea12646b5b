"""Tools that agents call: a name, a JSON schema, and an async function.

`tool` builds one from an async function; its type hints and docstring become the schema. `Tool.call` checks the
model's arguments, runs the function under the time limit, and returns a `ToolResult`. What the model did wrong
(arguments, a slow query, `ToolInputError`) is a result that it reads. Every other exception, such as
`ToolUnavailableError`, is a failure of ours: it is raised, and the rollout becomes a `Failure`.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, overload

import pydantic

from tunesmith.tool_log import record_call
from tunesmith.tools.arguments import ArgumentChecker

Run = Callable[..., Awaitable["str | ToolResult"]]
"""The function of a tool: keyword arguments in, the text for the model out."""
OpenSession = Callable[[], AbstractAsyncContextManager[Run]]

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
    ok: bool = True
    failure: FailureKind = ""
    ms: float = 0.0
    """Wall time of the call."""

    def __post_init__(self) -> None:
        if self.ok != (self.failure == ""):
            raise ValueError(f"ok={self.ok} with failure={self.failure!r}: a failed call, and no other, has a failure")


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
    has_own_start: bool = False
    """`timeout_s` counts from when the function calls what `get_start` returns, not from the call: it waits before."""
    open_session: OpenSession | None = field(default=None, repr=False)
    """Opens the state of one rollout: an async context manager whose value is called in place of `run`."""
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
            object.__setattr__(self, "checker", ArgumentChecker(dict(self.parameters)))
        except ValueError as error:
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
        required = [
            each for each in parameters.get("required", ()) if parameters["properties"][each].get("type") == "string"
        ]
        is_text = len(parameters.get("required", ())) == len(required) == 1
        settings.setdefault("text_argument", required[0] if is_text else None)
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
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any], *, run: Run | None = None) -> ToolResult:
        """Run the tool once; `run` is the function of a session.

        A branch of a rollout receives the result of its parent's call, or repeats the call if the tool has a session.
        """
        make = partial(self._call, arguments, run)
        return await record_call(self.name, arguments, make, has_state=run is not None, describe=_describe_result)

    async def _call(self, arguments: Mapping[str, Any], run: Run | None) -> ToolResult:
        started = time.perf_counter()
        wrong = self.checker.find_wrong(arguments)
        if wrong is not None:
            return ToolResult(text=f"Error: {wrong}.", ok=False, failure="arguments")
        given: str | ToolResult
        limit = asyncio.timeout(None if self.has_own_start else self.timeout_s)
        _limit.set((limit, self.timeout_s if self.has_own_start else None))
        try:
            async with limit:
                given = await (run or self.run)(**arguments)
        except ToolInputError as error:
            given = ToolResult(text=f"Error: {error}", ok=False, failure="error")
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"Error: {self.name} took longer than {self.timeout_s:g} s and was stopped."
            given = ToolResult(text=text, ok=False, failure="timeout")
        if not isinstance(given, str | ToolResult):
            raise TypeError(f"tool {self.name!r} returned {type(given).__name__}; it must return str or ToolResult")
        result = ToolResult(text=given) if isinstance(given, str) else given
        ms = 1000 * (time.perf_counter() - started)
        return ToolResult(text=result.text, ok=result.ok, failure=result.failure, ms=ms)


def get_start() -> Callable[[], None]:
    """Starts the time limit of the current call, for a tool with `has_own_start`; call it on the event loop."""
    limit, timeout_s = _limit.get()

    def start() -> None:
        if limit is not None and timeout_s is not None:
            limit.reschedule(asyncio.get_running_loop().time() + timeout_s)

    return start


_limit: ContextVar[tuple[asyncio.Timeout | None, float | None]] = ContextVar("tool_time_limit", default=(None, None))
"""The time limit of the current call, and the seconds that it gets once the tool has started."""


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
    schema = pydantic.create_model(name, **fields).model_json_schema()
    schema.pop("title", None)
    for each in schema.get("properties", {}).values():
        each.pop("title", None)
    return {"type": "object", "properties": {}, **schema}


def _describe_result(result: ToolResult) -> tuple[str, FailureKind]:
    """What the model reads: all but the wall time."""
    return result.text, result.failure
