"""Memoization of pure functions by the content of their argument.

Requests of a group, and successive requests of a conversation, repeat most of their content. A value is turned into a
bytes key with `build_cache_key`, so a value that was changed in place has another key. Each memoized function has an
LRU cache with a limit on entries and on key length; when the keys it has computed add up to `MAX_TOTAL_LENGTH`, the
cache is cleared.
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Callable
from typing import Any, TypeVar

Key = TypeVar("Key", str, bytes)
Result = TypeVar("Result")

MARSHAL_VERSION = 2
"""The newest marshal format without references to shared objects, which would make keys of equal values differ."""
MAX_TOTAL_LENGTH = 2**24
"""Characters or bytes of all keys in one cache; bounds memory in long runs."""


def build_cache_key(value: Any) -> bytes | None:
    """Bytes that are equal only for values of equal types, content and order; None for values marshal cannot write."""
    try:
        return marshal.dumps(value, MARSHAL_VERSION)
    except ValueError:
        return None


def load_cache_key(key: bytes) -> Any:
    """A new copy of the value that the key was built from."""
    return marshal.loads(key)


def memoize(*, max_entries: int, max_length: int) -> Callable[[Callable[[Key], Result]], Callable[[Key], Result]]:
    """Cache the results of a pure function of one str or bytes; keys longer than `max_length` are not cached.

    Callers share the cached results and must not change them.
    """

    def decorate(function: Callable[[Key], Result]) -> Callable[[Key], Result]:
        total_length = 0

        def compute(key: Key) -> Result:
            nonlocal total_length
            total_length += len(key)
            if total_length > MAX_TOTAL_LENGTH:
                cached.cache_clear()
                total_length = len(key)
            return function(key)

        cached: functools._lru_cache_wrapper[Result] = functools.lru_cache(maxsize=max_entries)(compute)

        @functools.wraps(function)
        def wrapper(key: Key) -> Result:
            return cached(key) if len(key) <= max_length else function(key)

        return wrapper

    return decorate


def memoize_value(*, max_entries: int, max_length: int) -> Callable[[Callable[[Any], Result]], Callable[[Any], Result]]:
    """As `memoize`, for a pure function of one value in JSON's types; other values are not cached."""

    def decorate(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
        # computed from a copy: the caller may change its own value later, and the result may share parts of it
        @memoize(max_entries=max_entries, max_length=max_length)
        def compute(cache_key: bytes) -> Result:
            return function(load_cache_key(cache_key))

        @functools.wraps(function)
        def wrapper(value: Any) -> Result:
            cache_key = build_cache_key(value)
            return function(value) if cache_key is None else compute(cache_key)

        return wrapper

    return decorate
