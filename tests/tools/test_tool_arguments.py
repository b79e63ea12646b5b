"""Arguments are checked as deep as the schema goes: what the model got wrong is a result that it reads."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from tunesmith.tools.arguments import find_wrong_argument
from tunesmith.tools.tool import Tool

pytestmark = pytest.mark.anyio


class Order(BaseModel):
    item: str
    pieces: int = 1
    parts: list[Order] = []


async def book(
    query: str,
    top: int | None = None,
    ids: Annotated[list[int], Field(max_length=2)] = [],  # noqa: B006 - never modified
    order: Order | None = None,
    share: Annotated[float, Field(ge=0, lt=1)] = 0.5,
    counts: dict[str, int] = {},  # noqa: B006 - never modified
    pair: tuple[int, str] = (1, "a"),
    kind: Literal["a", 3] | None = None,
) -> str:
    """Book."""
    return query[: (top or 1) + sum(ids)]


TOOL = Tool.from_function(book)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"top": "many"}, "the argument 'top' must be of type integer or null"),
        ({"ids": ["a"]}, "the argument 'ids'[0] must be of type integer"),
        ({"ids": [1, 2, 3]}, "the argument 'ids' must have at most 2 items"),
        ({"order": {"pieces": 2}}, "the argument 'order' has no 'item'"),
        (
            {"order": {"item": "pen", "parts": [{"item": 3}]}},
            "the argument 'order'['parts'][0]['item'] must be of type",
        ),
        ({"share": 1}, "the argument 'share' must be less than 1"),
        ({"share": -0.5}, "the argument 'share' must be at least 0"),
        ({"counts": {"a": "b"}}, "the argument 'counts'['a'] must be of type integer"),
        ({"pair": [1, 2]}, "the argument 'pair'[1] must be of type string"),
        ({"pair": [1]}, "the argument 'pair' must have at least 2 items"),
        ({"kind": "b"}, "the argument 'kind' must be a value that its schema has"),
    ],
)
async def test_wrong_value_is_a_result_and_the_function_is_not_called(arguments, sentence):
    result = await TOOL.call({"query": "a", **arguments})
    assert (result.ok, result.failure) == (False, "arguments")
    assert result.text.startswith(f"Error: {sentence}")


@pytest.mark.parametrize(
    "arguments",
    [
        {"top": None},
        {"top": 3, "ids": [1, 2], "share": 0, "counts": {"a": 1}, "pair": [1, "b"], "kind": 3},
        {"order": {"item": "pen", "parts": [{"item": "cap", "pieces": 2}]}},
        {"order": None, "kind": None},
    ],
)
async def test_values_that_the_schema_allows_are_passed(arguments):
    assert (await TOOL.call({"query": "abcdefgh", **arguments})).ok


def test_schema_of_the_caller_may_close_objects_and_fix_values():
    schema = {"type": "object", "properties": {"x": {"const": 1}, "y": {"additionalProperties": False}}}
    assert find_wrong_argument({"x": 1, "y": {}}, schema) is None
    assert find_wrong_argument({"x": 2}, schema) == "the argument 'x' must be one of 1"
    assert find_wrong_argument({"y": {"z": 1}}, schema) == "the argument 'y'['z'] is not allowed"


def test_value_that_is_nested_too_deeply_is_named():
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/L"}},
        "$defs": {"L": {"items": {"$ref": "#/$defs/L"}}},
    }
    value: list = []
    for _ in range(100_000):
        value = [value]
    assert find_wrong_argument({"x": value}, schema) == "the argument 'x' is nested too deeply"


def test_limits_and_null_as_openapi_3_0_writes_them():
    properties = {
        "x": {"type": "number", "minimum": 0, "exclusiveMinimum": False, "exclusiveMaximum": False},
        "y": {"type": "array", "items": {"type": "integer", "nullable": True}},
    }
    schema = {"type": "object", "properties": properties}
    assert find_wrong_argument({"x": 5, "y": [1, None]}, schema) is None
    assert find_wrong_argument({"x": -1}, schema) == "the argument 'x' must be at least 0"
