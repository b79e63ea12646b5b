"""Look up what a config names: functions, whose arguments are validated, and API keys.

A table maps names to functions. The arguments that a user may set are a function's keyword-only parameters, with their
types, ranges and defaults. Unknown names, missing arguments and values of another type raise ConfigError; for unknown
names it suggests the nearest known one.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tunesmith.errors import ConfigError

LoadFunction = Callable[[str], Callable[..., Any]]
"""Imports the function that a user named as `module:function` or `file.py:function`."""


def read_api_key(variable: str | None, *, knob: str) -> str | None:
    """The API key in the environment variable that a knob names; None if it names none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"{knob}: the environment variable {variable} is not set")
    return key


def check_list(name: str, given: object, is_item: Callable[[object], bool], *, items: str) -> None:
    """Raise unless an argument is a list or tuple of such items."""
    if not isinstance(given, list | tuple) or not all(map(is_item, given)):
        raise ConfigError(f"{name} must be a list of {items}, got {given!r}")


def find_function(
    name: str, table: Mapping[str, Callable[..., Any]], *, load: LoadFunction, where: str
) -> Callable[..., Any]:
    """The table's function of that name, or a user function if the name is a path."""
    if name in table:
        return table[name]
    if ":" in name or "." in name:
        return load(name)
    raise ConfigError(
        f"unknown {where} {name!r}: {suggest_name(name, list(table))}, or set your own as module:function"
    )


def bind_arguments(
    function: Callable[..., Any], args: Mapping[str, Any], *, where: str, reserved: Sequence[str] = ()
) -> Callable[..., Any]:
    """Validate the arguments against the function's keyword-only parameters, then bind them.

    `reserved` keywords are passed by the caller later and cannot be set by the user.
    """
    hints = _find_hints(function, where=where)
    parameters = [p for p in find_keywords(function).values() if p.name not in reserved]
    known = [parameter.name for parameter in parameters]
    bound = {}
    for name, value in args.items():
        if name not in known:
            raise ConfigError(f"unknown argument {name!r} in {where}: {suggest_name(name, known)}")
        try:
            bound[name] = TypeAdapter(hints.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{name}={value!r} in {where}: {error.errors()[0]['msg']}") from error
        if has_nan(value):
            raise ConfigError(f"{name}={value!r} in {where}: NaN is not a number")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in args]
    if missing:
        raise ConfigError(f"{where} needs the argument {missing[0]!r}")
    return partial(function, **bound)


def find_keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{function!r} is not a user-defined function or class: {error}") from error
    return {name: parameter for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}


def has_nan(value: Any) -> bool:
    """Whether plain, possibly nested values contain a NaN."""
    if isinstance(value, Mapping):
        return any(map(has_nan, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_nan, value))
    return isinstance(value, float) and math.isnan(value)


def suggest_name(name: str, known: Sequence[str]) -> str:
    """A clause that suggests the known names that begin with this one, else the nearest, or lists all of them."""
    longer = [repr(each) for each in known if name and each.startswith(f"{name}_")]
    if longer:
        return f"did you mean {' or '.join(longer)}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known)}" if known else "it takes none"


def _find_hints(function: Callable[..., Any], *, where: str) -> dict[str, Any]:
    target = function.__init__ if inspect.isclass(function) else function
    if not inspect.isroutine(target):
        target = type(target).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{where}: a type annotation cannot be resolved: {error}") from error
