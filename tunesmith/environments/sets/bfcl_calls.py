"""Which calls answer a single-turn question of the Berkeley Function Calling Leaderboard, as its own checker decides.

A description of a function has BFCL's types (`dict`, `float`, `tuple`, `any`). An accepted call is `{name: {parameter:
[value, ...]}}`, with "" among the values if the parameter may be left out. Texts are compared without spaces, case and
`,./-_*^`; an integer is a float, but not inside of a list; calls of parallel questions are in any order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Call = tuple[str, Mapping[str, Any]]
"""Name and arguments."""
Mistake = Literal["count", "name", "missing", "unexpected", "type", "value"]
TYPES: Mapping[str, type] = {
    "string": str, "integer": int, "float": float, "boolean": bool, "array": list, "tuple": list, "dict": dict,
    "any": str,
}  # fmt: skip
IGNORED = re.compile(r"[ ,./\-_*^]")


def find_mistake(
    functions: Sequence[Mapping[str, Any]],
    calls: Sequence[Call],
    accepted: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]],
    *,
    is_parallel: bool,
) -> Mistake | None:
    """The first mistake in the calls, or None; of parallel calls, that of the last call compared."""
    if len(calls) != len(accepted):
        return "count"
    rest = list(calls)
    for truth in accepted:
        ((name, values),) = truth.items()
        described = next((each for each in functions if each["name"] == name), functions[0])
        mistakes = [find_mistake_in_call(described, call, values) for call in (rest if is_parallel else rest[:1])]
        if None not in mistakes:
            return mistakes[-1]
        rest.pop(mistakes.index(None))
    return None


def find_mistake_in_call(
    described: Mapping[str, Any], call: Call, accepted: Mapping[str, Sequence[Any]]
) -> Mistake | None:
    name, arguments = call
    parameters = described["parameters"]
    if name != described["name"]:
        return "name"
    if any(each not in arguments for each in parameters["required"]):
        return "missing"
    for key, value in arguments.items():
        if key not in parameters["properties"] or key not in accepted:
            return "unexpected"
        if mistake := find_mistake_in_value(parameters["properties"][key], value, accepted[key]):
            return mistake
    is_short = any(key not in arguments and "" not in values for key, values in accepted.items())
    return "missing" if is_short else None


def find_mistake_in_value(schema: Mapping[str, Any], value: Any, accepted: Sequence[Any]) -> Mistake | None:
    expected: Any = TYPES[schema["type"]]  # Any: mypy would narrow the value to object
    inner = TYPES[schema["items"]["type"]] if expected is list else None
    if expected is float and type(value) is int:
        value = float(value)
    given = find_type(accepted)
    if type(value) is expected:
        if inner is not None and not any(has_inner_types(value, each, inner) for each in accepted):
            return "type"
    elif type(value) is not given:
        return "type"
    # answers of another type than the description's are names of variables, which are compared as they are
    if type(value) is not expected or given not in (None, expected):
        is_right = value in accepted
    elif expected is dict:
        is_right = any(is_same_dict(value, each) for each in accepted if each != "")
    elif inner is dict:
        is_right = any(len(value) == len(each) and all(map(is_same_dict, value, each)) for each in accepted)
    elif expected is list:
        is_right = [normalize(each) for each in value] in [[normalize(item) for item in each] for each in accepted]
    elif expected is str:
        is_right = normalize(value) in [normalize(each) for each in accepted if isinstance(each, str)]
    else:
        is_right = value in accepted
    return None if is_right else "value"


def find_type(accepted: Sequence[Any]) -> type | None:
    """The type of the first value that is not "" for a parameter that may be left out."""
    return next((type(each) for each in accepted if each != ""), None)


def has_inner_types(value: Sequence[Any], accepted: Any, inner: type) -> bool:
    return not isinstance(accepted, list) or all(type(each) in (inner, find_type(accepted)) for each in value)


def is_same_dict(value: Any, accepted: Any) -> bool:
    """Whether a dictionary has accepted values; a few answers have a single value in place of a list."""
    if not isinstance(value, dict) or not isinstance(accepted, dict) or not all(key in accepted for key in value):
        return False
    lists = {key: each if isinstance(each, list) else [each] for key, each in accepted.items()}
    return all(
        normalize(value[key]) in map(normalize, options) if key in value else "" in options
        for key, options in lists.items()
    )


def normalize(value: Any) -> Any:
    return IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
