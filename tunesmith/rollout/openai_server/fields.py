"""The fields of requests: a table for each kind of object says how its fields are read.

What is in no table is refused, not ignored; null is the same as leaving a field out.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Read = Callable[[Any, str], Any]
"""From the JSON value of a field and its name to the value that is used; None: as if the field were left out. A
ValueError says what is wrong."""
Fields = Mapping[str, Read]

MAX_NUMBER = 2**63
MAX_SHOWN_CHARS = 80
KINDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number", dict: "an object"}


class ApiError(Exception):
    """A refused or failed request."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """Machine-readable error code, if the HTTP status is not specific enough."""
        self.param = param
        """The invalid request field."""


class RequestError(ApiError, ValueError):
    """A request that cannot be fulfilled."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(status, message, param=param, code=code)


def read_fields(raw: Any, known: Fields, where: str = "") -> dict[str, Any]:
    """The fields that an object sets; `where` is its name in the request, empty for the body. Raises RequestError."""
    found = {}
    for key, value in read_value(dict)(raw, where or "the request body").items():
        if value is None:
            continue
        name = f"{where}.{key}" if where else key
        if key not in known:
            raise RequestError(f"{name} is not supported by this endpoint; leave it out", param=_root(name))
        try:
            read = known[key](value, name)
        except RequestError:
            raise
        except ValueError as error:
            raise RequestError(str(error), param=_root(name)) from error
        if read is not None:
            found[key] = read
    return found


def translate_fields(raw: Any, known: Fields, where: str = "") -> dict[str, Any]:
    """The fields of a chat request for an object of another API; the reader of a field returns some of them."""
    fields: dict[str, Any] = {}
    for read in read_fields(raw, known, where).values():
        fields |= read
    return fields


def rename(chat_field: str) -> Read:
    """A field that a chat request has under this name; it is checked there."""
    return lambda value, _: {chat_field: value}


def shorten(value: Any) -> str:
    return textwrap.shorten(repr(value), MAX_SHOWN_CHARS)


def _root(where: str) -> str:
    return where.partition("[")[0].partition(".")[0]


def keep(value: Any, name: str) -> Any:
    """A field that is checked where it is used."""
    return value


def ignore(value: Any, name: str) -> None:
    """A field that changes nothing in what is sampled."""


def check(read: Read) -> Read:
    """A field that is used elsewhere."""

    def read_nothing(value: Any, name: str) -> None:
        read(value, name)

    return read_nothing


def only(*values: Any) -> Read:
    """A field that is not supported; these values are accepted because they have no effect."""

    def read(value: Any, name: str) -> None:
        if value not in values:
            allowed = ", ".join(map(repr, values))
            raise ValueError(f"{name}={shorten(value)} is not supported by this endpoint; allowed: {allowed}")

    return read


def read_value(kind: type) -> Read:
    """A field of a type; whole numbers are numbers, true and false are not."""

    def read(value: Any, name: str) -> Any:
        if kind in (int, float):
            if type(value) in (int, kind) and abs(value) < MAX_NUMBER:
                return kind(value)
        elif isinstance(value, kind):
            return value
        raise RequestError(f"{name} must be {KINDS[kind]}, got {shorten(value)}", param=_root(name))

    return read


def read_number(kind: type, low: float, high: float = math.inf, *, is_low_open: bool = False) -> Read:
    """A number within bounds."""
    read_any = read_value(kind)

    def read(value: Any, name: str) -> Any:
        number = read_any(value, name)
        if not low <= number <= high or (is_low_open and number == low):
            raise ValueError(f"{name}={number} is outside of {'(' if is_low_open else '['}{low}, {high}]")
        return number

    return read


def read_object(known: Fields) -> Read:
    """An object with these fields."""
    return lambda value, name: read_fields(value, known, name)


def read_list(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise RequestError(f"{name} must be a list of objects", param=_root(name))
    return value


def read_text(value: Any, name: str, types: Sequence[str]) -> str:
    """Text, or the joined texts of a list of parts of the given types."""
    if isinstance(value, str):
        return value
    texts = []
    for part in read_list(value, name):
        kind = part.get("type")
        if kind not in types:
            raise RequestError(f"{name} has a part of type {kind!r}; allowed: {', '.join(types)}", param=_root(name))
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(f"{name} has a part without text", param=_root(name))
        texts.append(text)
    return "\n".join(texts)


def read_texts(max_texts: int, *, also_one: bool = False) -> Read:
    """A list of texts that are not empty; `also_one`: or one such text."""
    form = f"{'text or ' if also_one else ''}a list of at most {max_texts} non-empty texts"

    def read(value: Any, name: str) -> tuple[str, ...]:
        texts = [value] if also_one and isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > max_texts or not all(isinstance(t, str) and t for t in texts):
            raise ValueError(f"{name} must be {form}")
        return tuple(texts)

    return read


TEXT, FLAG, OBJECT = read_value(str), read_value(bool), read_value(dict)
