"""The built-in tools as `Tool`s: python and calculator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tunesmith.config.tools import PythonToolSection
from tunesmith.tools.calculator import CALCULATOR_TOOL, calculate
from tunesmith.tools.python.call import PythonResult
from tunesmith.tools.python.tool import PythonTool
from tunesmith.tools.tool import Run, Tool, ToolResult, get_start


def build_python_tool(settings: PythonToolSection | None = None, *, is_session: bool = False) -> Tool:
    """The sandboxed Python tool; with `is_session`, variables are kept during a rollout.

    The sandbox has its own time limit. Neither it nor a `timeout_s` of the tool counts the time that a call waits for a
    worker, which `max_wait_s` bounds.
    """
    python = PythonTool(settings)

    async def run(code: str) -> ToolResult:
        return convert_result(await python(code, on_start=get_start()))

    @asynccontextmanager
    async def open_session() -> AsyncIterator[Run]:
        async with python.session() as session:

            async def run_in_session(code: str) -> ToolResult:
                return convert_result(await session(code, on_start=get_start()))

            yield run_in_session

    function = python.build_schema(is_session=is_session)["function"]
    return Tool(
        **function,
        text_argument="code",
        run=run,
        timeout_s=None,
        has_own_start=True,
        max_result_chars=python.settings.max_result_chars,
        open_session=open_session if is_session else None,
    )


def convert_result(result: PythonResult) -> ToolResult:
    """A result of the sandbox; everything but the outcome ok is a failed call."""
    failure = result.outcome
    return ToolResult(text=result.text) if failure == "ok" else ToolResult(text=result.text, ok=False, failure=failure)


def build_calculator_tool() -> Tool:
    """Exact arithmetic."""

    async def run(expression: str) -> ToolResult:
        text = calculate(expression)
        is_error = text.startswith("Error:")
        return ToolResult(text=text, ok=not is_error, failure="error" if is_error else "")

    function = CALCULATOR_TOOL["function"]
    return Tool(
        **function,
        text_argument="expression",
        run=run,
    )
