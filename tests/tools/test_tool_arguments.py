"""Arguments are checked as deep as the schema goes: what the model got wrong is a result that it reads."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from tunesmith.tools.tool import ArgumentChecker, Tool

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
        ({"kind": "b"}, "the argument 'kind' must be one of a, 3 or be of type null"),
        ({"top": 3.0}, "the argument 'top' must be of type integer or null"),
        ({"top": True}, "the argument 'top' must be of type integer or null"),
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
    assert ArgumentChecker(schema).find_wrong({"x": 1, "y": {}}) is None
    assert ArgumentChecker(schema).find_wrong({"x": 2}) == "the argument 'x' must be 1"
    assert ArgumentChecker(schema).find_wrong({"y": {"z": 1}}) == (
        "the argument 'y': Additional properties are not allowed ('z' was unexpected)"
    )


def test_value_that_is_nested_too_deeply_is_an_error_of_the_model():
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/L"}},
        "$defs": {"L": {"items": {"$ref": "#/$defs/L"}}},
    }
    value: list = []
    for _ in range(100_000):
        value = [value]
    assert ArgumentChecker(schema).find_wrong({"x": value}) == "the arguments are nested too deeply"


def test_limits_and_null_as_openapi_3_0_writes_them():
    properties = {
        "x": {"type": "number", "minimum": 0, "exclusiveMinimum": False, "exclusiveMaximum": False},
        "y": {"type": "array", "items": {"type": "integer", "nullable": True}},
    }
    schema = {"type": "object", "properties": properties}
    assert ArgumentChecker(schema).find_wrong({"x": 5, "y": [1, None]}) is None
    assert ArgumentChecker(schema).find_wrong({"x": -1}) == "the argument 'x' must be at least 0"
    schema["properties"]["x"] |= {"exclusiveMinimum": True}
    assert ArgumentChecker(schema).find_wrong({"x": 0}) == "the argument 'x' must be more than 0"


@pytest.mark.parametrize(
    ("schema", "arguments", "sentence"),
    [
        ({"x": {"pattern": "^[0-9]+$"}}, {"x": "a"}, "the argument 'x': 'a' does not match '^[0-9]+$'"),
        ({"x": {"uniqueItems": True}}, {"x": [1, 1]}, "the argument 'x': [1, 1] has non-unique elements"),
        ({"x": {"multipleOf": 0.5}}, {"x": float("inf")}, "the arguments have a number that cannot be checked: "),
        ({"x": {"multipleOf": 0.5}}, {"x": 10**400}, "the arguments have a number that cannot be checked: "),
        ({"x": {"items": {"not": {}}}}, {"x": ["a" * 10**6]}, "the argument 'x'[0]: 'aaa"),
        ({"x": {}}, {"y" * 10**6: 1}, f"there is no argument '{'y' * 60}'; the arguments are x"),
    ],
)
def test_other_keywords_are_checked_too(schema, arguments, sentence):
    wrong = ArgumentChecker({"type": "object", "properties": schema}).find_wrong(arguments)
    assert wrong.startswith(sentence) and len(wrong) < 400


def test_keywords_that_hold_for_all_arguments_are_checked():
    schema = {"type": "object", "properties": {"url": {}, "query": {}}, "minProperties": 1}
    assert ArgumentChecker(schema).find_wrong({"url": "a"}) is None
    assert ArgumentChecker(schema).find_wrong({}).startswith("the arguments: {} ")


def test_the_dialect_of_a_schema_is_the_one_that_it_names():
    pair = {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}
    schema = {"type": "object", "properties": {"x": pair}, "$schema": "http://json-schema.org/draft-07/schema#"}
    assert ArgumentChecker(schema).find_wrong({"x": [1, "a"]}) is None
    assert ArgumentChecker(schema).find_wrong({"x": [1, 2]}) == "the argument 'x'[1] must be of type string"


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strng"}, "properties/x/type: 'strng' is not valid"),
        ({"minimum": "3"}, "properties/x/minimum: '3' is not of type 'number'"),
        ({"pattern": "("}, "properties/x/pattern: '\\(' is not a 'regex'"),
        ({"$ref": "#/$defs/None"}, r"\$ref '#/\$defs/None' names no part"),
        ({"anyOf": [{"items": {"$ref": "#/$defs/B"}}]}, r"\$ref '#/\$defs/B' names no part"),
        ({"$ref": "https://example.com/schema"}, r"\$ref 'https://example.com/schema' names no part"),
    ],
)
def test_an_invalid_schema_is_refused_when_the_tool_is_declared(schema, reason):
    parameters = {"type": "object", "properties": {"x": schema}}
    with pytest.raises(ValueError, match=f"the parameters of tool 'book' are no valid JSON schema: {reason}"):
        Tool(name="book", description="Book.", parameters=parameters, run=book)


async def test_what_is_no_text_is_refused_by_the_name_of_its_part():
    async def look(place: str) -> list:
        """Look."""
        return [{"type": "text", "text": place}, {"type": "image_url", "image_url": {}}]

    tool = Tool.from_function(look)
    with pytest.raises(TypeError, match="tool 'look' returned a part 'image_url'; it must return str or ToolResult"):
        await tool.call({"place": "a"})


def test_tools_with_the_same_schema_share_a_checker():
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
    tools = [Tool(name=name, description="x", parameters=dict(parameters), run=book) for name in "ab"]
    assert tools[0].checker is tools[1].checker
    other = Tool(name="c", description="x", parameters={**parameters, "required": ["x"]}, run=book)
    assert other.checker.find_wrong({}) == "the argument 'x' is missing; the arguments are x"
    assert tools[0].checker.find_wrong({}) is None
    with pytest.raises(ValueError, match="the parameters of tool 'a' are no valid JSON schema"):
        Tool(name="a", description="x", parameters={**parameters, "default": object()}, run=book)
