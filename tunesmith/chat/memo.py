"""What a value holds, as a key: pure functions that memoize what they made of it.

Requests of one group, and the requests of one conversation, repeat most of what they hold. What is remembered is found
by content, so a value that was changed in place is another value. Few and short keys are kept, and the oldest go; when
those that were remembered add up to `MAX_TOTAL_LENGTH`, all go.
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Callable
from typing import Any, TypeVar

Key = TypeVar("Key", str, bytes)
Result = TypeVar("Result")

FORMAT = 2
"""Of the bytes: the last one in which objects that are used twice are written twice."""
MAX_TOTAL_LENGTH = 2**24
"""Characters or bytes of the keys of one function, so that memory does not grow with the length of a run."""


def build_cache_key(value: Any) -> bytes | None:
    """Bytes that only values of the same types, content and order have; None where a type is not Python's own."""
    try:
        return marshal.dumps(value, FORMAT)
    except ValueError:
        return None


def load_cache_key(frozen: bytes) -> Any:
    """A new value that holds what the frozen one held."""
    return marshal.loads(frozen)


def memoize(*, max_entries: int, max_length: int) -> Callable[[Callable[[Key], Result]], Callable[[Key], Result]]:
    """Remember the results of a pure function of one text or of bytes; keys of more than `max_length` are not kept.

    Results are shared by all callers and must not be changed.
    """

    def decorate(function: Callable[[Key], Result]) -> Callable[[Key], Result]:
        total_length = 0

        def compute(key: Key) -> Result:
            nonlocal total_length
            total_length += len(key)
            if total_length > MAX_TOTAL_LENGTH:
                known.cache_clear()
                total_length = len(key)
            return function(key)

        known: functools._lru_cache_wrapper[Result] = functools.lru_cache(maxsize=max_entries)(compute)

        @functools.wraps(function)
        def recall(key: Key) -> Result:
            return known(key) if len(key) <= max_length else function(key)

        return recall

    return decorate
