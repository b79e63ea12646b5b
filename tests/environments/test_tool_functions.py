"""Tools of async functions: schemas, argument checks, time limits, and whose fault a failed call is."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from tunesmith.errors import ToolUnavailableError
from tunesmith.tools.tool import Tool, ToolInputError, tool

pytestmark = pytest.mark.anyio


@tool
async def find(query: str, top_n: int = 4, order: Literal["old", "new"] = "new") -> str:
    """Find documents.

    By words.
    """
    return f"{query}/{top_n}/{order}"


def test_the_schema_is_that_of_the_signature_and_docstring():
    assert find.schema == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find documents. By words.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "top_n": {"type": "integer", "default": 4},
                    "order": {"type": "string", "enum": ["old", "new"], "default": "new"},
                },
                "required": ["query"],
            },
        },
    }
    assert find.text_argument == "query"


async def test_a_call_has_the_defaults_of_the_function():
    result = await find.call({"query": "a"})
    assert (result.text, result.ok, result.failure) == ("a/4/new", True, "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, "'query' is missing"),
        ({"query": 3}, "'query' must be of type string"),
        ({"query": "a", "top_n": True}, "'top_n' must be of type integer"),
        ({"query": "a", "top_n": 1.5}, "'top_n' must be of type integer"),
        ({"query": "a", "order": "odd"}, "'order' must be one of old, new"),
        ({"query": "a", "other": 1}, "no argument 'other'"),
    ],
)
async def test_wrong_arguments_are_a_result(arguments, sentence):
    result = await find.call(arguments)
    assert (result.ok, result.failure) == (False, "arguments")
    assert sentence in result.text


async def test_the_models_mistake_is_a_result_and_ours_is_raised():
    async def work(query: str) -> str:
        """Work."""
        if query == "model":
            raise ToolInputError("write a number")
        if query == "server":
            raise ToolUnavailableError("the server is down")
        raise TimeoutError("of a socket")

    worker = Tool.from_function(work)
    result = await worker.call({"query": "model"})
    assert (result.text, result.failure) == ("Error: write a number", "error")
    with pytest.raises(ToolUnavailableError, match="the server is down"):
        await worker.call({"query": "server"})
    with pytest.raises(TimeoutError, match="of a socket"):
        await worker.call({"query": "socket"})


async def test_a_slow_call_is_cancelled_and_its_result_says_so():
    cancelled = asyncio.Event()

    @tool(timeout_s=0.01)
    async def sleep(query: str) -> str:
        """Sleep."""
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return ""

    result = await sleep.call({"query": "a"})
    assert (result.ok, result.failure) == (False, "timeout")
    assert result.text == "Error: sleep took longer than 0.01 s and was stopped."
    assert cancelled.is_set()


async def test_a_result_of_another_type_is_an_error_of_the_tool():
    async def count(query: str) -> str:
        """Count."""
        return 3

    with pytest.raises(TypeError, match="'count' returned int"):
        await Tool.from_function(count).call({"query": "a"})


async def test_text_argument_is_the_only_required_text():
    @tool
    async def two(a: str, b: str) -> str:
        """Two."""
        return a + b

    @tool
    async def number(n: int) -> str:
        """Number."""
        return str(n)

    assert two.text_argument is number.text_argument is None


def test_malformed_tools_are_refused():
    async def plain(query) -> str:
        """Plain."""

    async def silent(query: str) -> str: ...

    def blocking(query: str) -> str:
        """Block."""

    with pytest.raises(ValueError, match="parameter 'query' of tool 'plain' has no type hint"):
        Tool.from_function(plain)
    with pytest.raises(ValueError, match="'silent' has no description"):
        Tool.from_function(silent)
    with pytest.raises(ValueError, match="'blocking' must be async"):
        Tool.from_function(blocking)
    with pytest.raises(ValueError, match="'answer' is not a tool name"):
        Tool.from_function(find.run, name="answer")
    with pytest.raises(ValueError, match="text_argument='other' is no parameter"):
        Tool.from_function(find.run, text_argument="other")
