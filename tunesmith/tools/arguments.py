"""Checks a model's arguments against the JSON schema of a tool.

What a schema says about types and values is checked, inside lists and objects too, so that a function is called with
what its type hints allow: an error that the model made is a result that it reads, not a failure of the rollout.
Keywords that are not listed here, such as `pattern` and `format`, are left to the function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

JSON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip
LIMITS: Mapping[str, str] = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "more than",
    "exclusiveMaximum": "less than",
}
SIZES: Mapping[str, tuple[type, str, str]] = {
    "minLength": (str, "at least", "characters"),
    "maxLength": (str, "at most", "characters"),
    "minItems": (list, "at least", "items"),
    "maxItems": (list, "at most", "items"),
}
"""Keyword -> type that it limits, comparison, unit."""


def find_wrong_argument(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments: one that is missing, unknown, or of another JSON type or value."""
    properties = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"the argument {name!r} is missing; the arguments are {', '.join(properties)}"
    for name, value in arguments.items():
        if name not in properties:
            return f"there is no argument {name[:60]!r}; the arguments are {', '.join(properties)}"
        try:
            wrong = find_wrong_value(value, properties[name], repr(name), parameters)
        except RecursionError:
            wrong = f"{name!r} is nested too deeply"
        if wrong is not None:
            return f"the argument {wrong}"
    return None


def find_wrong_value(value: Any, schema: Any, name: str, root: Mapping[str, Any]) -> str | None:
    """What is wrong with a value, beginning with its name; `root` has the definitions that `$ref` names."""
    if not isinstance(schema, Mapping):
        return None if schema is not False else f"{name} is not allowed"
    if "$ref" in schema:
        return find_wrong_value(value, find_definition(schema["$ref"], root), name, root)
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            found = [find_wrong_value(value, each, name, root) for each in schema[keyword]]
            if None not in found:
                return choose_message(value, found, schema[keyword], name, root)
    for each in schema.get("allOf", ()):
        if (wrong := find_wrong_value(value, each, name, root)) is not None:
            return wrong
    if value is None and schema.get("nullable") is True:  # as OpenAPI 3.0 writes it
        return None
    kinds = list_types(schema, root)
    if kinds and not any(has_type(value, each) for each in kinds):
        return f"{name} must be of type {' or '.join(kinds)}"
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed and value not in allowed:
        return f"{name} must be one of {', '.join(map(str, allowed))}"
    return find_limit(value, schema, name) or find_wrong_part(value, schema, name, root)


def find_limit(value: Any, schema: Mapping[str, Any], name: str) -> str | None:
    """The limit of a number or of a length that a value breaks."""
    if is_number(value):
        limits = {keyword: schema[keyword] for keyword in LIMITS if is_number(schema.get(keyword))}
        is_kept = {
            "minimum": value >= limits.get("minimum", value),
            "maximum": value <= limits.get("maximum", value),
            "exclusiveMinimum": "exclusiveMinimum" not in limits or value > limits["exclusiveMinimum"],
            "exclusiveMaximum": "exclusiveMaximum" not in limits or value < limits["exclusiveMaximum"],
        }
        for keyword, limit in limits.items():
            if not is_kept[keyword]:
                return f"{name} must be {LIMITS[keyword]} {limit}"
    for keyword, (kind, comparison, unit) in SIZES.items():
        size = schema.get(keyword)
        if isinstance(value, kind) and isinstance(size, int):
            length = len(value)  # type: ignore[arg-type]
            if length < size if keyword.startswith("min") else length > size:
                return f"{name} must have {comparison} {size} {unit}"
    return None


def find_wrong_part(value: Any, schema: Mapping[str, Any], name: str, root: Mapping[str, Any]) -> str | None:
    """What is wrong inside of a list or an object."""
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(value, list):
        first: Sequence[Any] = schema.get("prefixItems", ())
        schemas = [*first[: len(value)], *[schema.get("items", True)] * (len(value) - len(first))]
        parts = [(each, schemas[place], f"{name}[{place}]") for place, each in enumerate(value)]
    elif isinstance(value, dict):
        for key in schema.get("required", ()):
            if key not in value:
                return f"{name} has no {key!r}"
        others, known = schema.get("additionalProperties", True), schema.get("properties", {})
        parts = [(each, known.get(key, others), f"{name}[{key[:60]!r}]") for key, each in value.items()]
    return next((wrong for part in parts if (wrong := find_wrong_value(*part, root)) is not None), None)


def find_definition(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema at a path such as `#/$defs/Order`; anything is allowed where there is none."""
    found: Any = root
    for key in reference.removeprefix("#/").split("/"):
        found = found.get(key, True) if isinstance(found, Mapping) else True
    return found


def choose_message(
    value: Any, found: Sequence[str | None], schemas: Sequence[Any], name: str, root: Mapping[str, Any]
) -> str:
    """What the one alternative of the value's type says, or the types among which the value may choose."""
    types = [list_types(each, root) for each in schemas]
    fitting = [wrong for wrong, kinds in zip(found, types, strict=True) if any(has_type(value, each) for each in kinds)]
    if len(fitting) == 1 and fitting[0] is not None:
        return fitting[0]
    kinds = dict.fromkeys(kind for each in types for kind in each)
    return (
        f"{name} must be of type {' or '.join(kinds)}" if all(types) else f"{name} must be a value that its schema has"
    )


def list_types(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The types that a schema names."""
    if isinstance(schema, Mapping) and "$ref" in schema:
        schema = find_definition(schema["$ref"], root)
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return [kind] if isinstance(kind, str) else list(kind or ())


def has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, JSON_TYPES.get(kind, object))


def is_number(value: Any) -> bool:
    """False for booleans, which `exclusiveMinimum` has in OpenAPI 3.0."""
    return isinstance(value, int | float) and not isinstance(value, bool)
