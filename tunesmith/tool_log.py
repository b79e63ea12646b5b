"""The results of a rollout's tool calls, so that a branch of it receives them instead of making the calls again.

A workflow makes its calls through `replayable` functions, or through tools that use `record_call`. Outside of branching
rollouts both only make the call. A branch receives the results of the calls that its parent had finished before the
branch point, matched by name and arguments. A call with state (a Python session) is made again, to restore the state,
and must return the same result.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from tunesmith.errors import ReplayError

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedToolCall:
    """One finished call: what it returned or raised."""

    key: tuple[str, str]
    """Name of the tool, and its arguments as JSON."""
    result: Any = None
    error: Exception | None = None


class ToolLog:
    """The finished tool calls of one rollout, and those of its parent that it has not made yet."""

    def __init__(self, inherited: Sequence[RecordedToolCall] = ()) -> None:
        self.calls: list[RecordedToolCall] = []
        """In the order in which they finished, inherited ones included."""
        self.num_inherited = 0
        """Calls whose result came from the parent."""
        self.num_repeated = 0
        """Calls with state that the parent had made and that were made again."""
        self._open: dict[tuple[str, str], deque[RecordedToolCall]] = {}
        for call in inherited:
            self._open.setdefault(call.key, deque()).append(call)

    def take_inherited(self, key: tuple[str, str]) -> RecordedToolCall | None:
        """The parent's next call with this name and these arguments."""
        calls = self._open.get(key)
        return calls.popleft() if calls else None


CURRENT_LOG: ContextVar[ToolLog | None] = ContextVar("tunesmith_tool_log", default=None)
"""The log of the rollout that the current code belongs to; None outside of branching rollouts."""


async def record_call(
    name: str,
    arguments: Mapping[str, Any],
    call: Callable[[], Awaitable[Result]],
    *,
    has_state: bool = False,
    describe: Callable[[Result], Any] = lambda result: result,
) -> Result:
    """Make a tool call, or return the parent's result of the same call.

    `has_state`: the call is made again in a branch; `describe` of its result must then equal the parent's.
    """
    log = CURRENT_LOG.get()
    if log is None:
        return await call()
    key = (name, json.dumps(dict(arguments), sort_keys=True, default=repr))
    inherited = log.take_inherited(key)
    if inherited is not None and not has_state:
        log.num_inherited += 1
        log.calls.append(inherited)
        if inherited.error is not None:
            raise inherited.error
        return copy.deepcopy(inherited.result)
    try:
        result = await call()
    except Exception as error:
        log.calls.append(RecordedToolCall(key=key, error=error))
        raise
    if inherited is not None:
        log.num_repeated += 1
        if inherited.error is not None or describe(inherited.result) != describe(result):
            raise ReplayError(f"tool {name!r} keeps state, and in the branch the same call gave another result")
    log.calls.append(RecordedToolCall(key=key, result=copy.deepcopy(result)))
    return result


def replayable(function: Callable[Parameters, Awaitable[Result]]) -> Callable[Parameters, Awaitable[Result]]:
    """Decorator of an async tool function: branches of a rollout receive its results instead of calling it again.

    The result must depend on the arguments alone and be copyable.
    """
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{getattr(function, '__name__', function)!r} must be async: define it with `async def`")
    signature, name = inspect.signature(function), f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    async def recorded(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return await record_call(name, bound.arguments, lambda: function(*args, **kwargs))

    return recorded
