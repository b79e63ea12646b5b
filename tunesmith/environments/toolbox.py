"""The tools of one rollout: runs the calls, with limits, sessions, and truncated results.

A call of an unknown tool, with unreadable arguments or over a limit has a result that says so. The sessions of stateful
tools are opened by the first call and closed with the rollout; when a prefix is continued, its calls are repeated first
and must give the same results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tunesmith.environments.transcript import Segment, Transcript
from tunesmith.errors import ToolUnavailableError
from tunesmith.rollout.cancellation import gather_all
from tunesmith.rollout.open_sessions import SESSIONS
from tunesmith.storage import clean_text
from tunesmith.tools.python.call import shorten_text
from tunesmith.tools.tool import OpenSession, Run, Tool, ToolResult

NO_OUTPUT = "(the result is empty)"


@dataclass(slots=True, kw_only=True)
class Toolbox:
    """The tools of one rollout; an async context manager that closes their sessions."""

    tools: Mapping[str, Tool]
    max_calls: int
    max_result_chars: int
    has_state: bool = False
    """Whether calls change something that all tools share: they run in order, and a branch repeats them."""
    num_calls: Counter[str] = field(default_factory=Counter)
    """Calls that were run, by tool."""
    _sessions: dict[OpenSession, Any] = field(default_factory=dict)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Toolbox:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def replay(self, transcript: Transcript) -> None:
        """Count the calls of a prefix, and repeat those of stateful tools."""
        self.num_calls.update(transcript.tool_counts)
        for call, result in transcript.pairs:
            tool = self.tools.get(call.tool)
            if tool is None or not tool.is_stateful or call.arguments is None or result.failure == "call_limit":
                continue
            repeated = await tool.call(call.arguments, run=await self._open(tool))
            if repeated.failure != result.failure or self._format(tool, repeated) != result.result:
                raise ToolUnavailableError(
                    f"the prefix cannot be continued: a call of the stateful tool {tool.name!r} gave another result "
                    "when it was repeated"
                )

    async def run(self, calls: Sequence[Segment]) -> list[Segment]:
        """The results of calls, in order; calls of stateless tools run at the same time."""
        refusals = [self._count(call) for call in calls]
        if self.has_state or any(call.tool in self.tools and self.tools[call.tool].is_stateful for call in calls):
            return [await run for run in map(self._run, calls, refusals)]
        return await gather_all(map(self._run, calls, refusals))

    def _count(self, call: Segment) -> ToolResult | None:
        """Count a call that is within the limits; the result of one that is not run."""
        refusal = self._refuse(call)
        if refusal is None or refusal.failure != "call_limit":
            self.num_calls[call.tool] += 1
        return refusal

    async def _run(self, call: Segment, refusal: ToolResult | None) -> Segment:
        if refusal is not None:
            result, text = refusal, refusal.text
        else:
            assert call.arguments is not None
            tool = self.tools[call.tool]
            result = await tool.call(call.arguments, run=await self._open(tool))
            text = self._format(tool, result)
        return Segment(
            kind="result",
            text=text,
            result=text,
            tool=call.tool,
            ok=result.ok,
            failure=result.failure,
            ms=result.ms,
            call_id=call.call_id,
        )

    def _refuse(self, call: Segment) -> ToolResult | None:
        """The result of a call that is not run."""
        tool = self.tools.get(call.tool)
        if sum(self.num_calls.values()) >= self.max_calls:
            return _build_limit(f"The limit of {self.max_calls} tool calls is reached")
        if tool is None:
            names = ", ".join(self.tools) or "none"
            text = f"Error: there is no tool {call.tool[:60]!r}; the tools are {names}."
            return ToolResult(text=text, failure="unknown_tool")
        if tool.max_calls is not None and self.num_calls[tool.name] >= tool.max_calls:
            return _build_limit(f"The limit of {tool.max_calls} calls of {tool.name} is reached")
        if call.arguments is None:
            names = ", ".join(tool.parameters.get("properties", {}))
            text = f"Error: the call of {tool.name} cannot be read; its arguments are {names}."
            return ToolResult(text=text, failure="arguments")
        return None

    def _format(self, tool: Tool, result: ToolResult) -> str:
        limit = tool.max_result_chars or self.max_result_chars
        return shorten_text(clean_text(result.text).strip("\n") or NO_OUTPUT, limit)

    async def _open(self, tool: Tool) -> Run | None:
        if tool.open_session is None:
            return tool.run if self.has_state else None
        if tool.open_session not in self._sessions:
            self._sessions[tool.open_session] = await self._stack.enter_async_context(_count(tool.open_session))
        session = self._sessions[tool.open_session]
        return session if tool.in_session is None else tool.in_session(session)


@asynccontextmanager
async def _count(open_session: OpenSession) -> AsyncIterator[Any]:
    """A session, counted until it is closed."""
    SESSIONS["opened"] += 1
    try:
        async with open_session() as session:
            yield session
    finally:
        SESSIONS["closed"] += 1


def _build_limit(sentence: str) -> ToolResult:
    text = f"{sentence}: this call was not run. Give the final answer now."
    return ToolResult(text=text, failure="call_limit")
