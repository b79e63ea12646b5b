"""What Python's garbage collector leaves alone while a run samples and trains.

A full collection over the objects of libraries takes a second, so a run freezes what exists when it begins, and again
what it keeps once everything is compiled. Both are thawed at its end: pipelines train several times in one process, and
cycles that stay frozen would keep the models and caches of earlier stages in memory.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

INTERPRETERS_OWN = 2_000
"""More than the objects that Python 3.12 itself has frozen when a program begins (375), far less than those of
libraries."""
_frozen_by: set[str] = set()
"""Who has exempted objects from garbage collection: "program", "run"."""


@contextmanager
def frozen_objects() -> Iterator[None]:
    """Exempt existing objects from garbage collection, unless the program or another run has done so.

    Counting a million frozen objects takes 0.1 s, so a program that has frozen its objects is asked once.
    """
    if not _frozen_by and gc.get_freeze_count() > INTERPRETERS_OWN:
        _frozen_by.add("program")
    if _frozen_by:
        yield
        return
    gc.freeze()
    _frozen_by.add("run")
    try:
        yield
    finally:
        _frozen_by.remove("run")
        gc.unfreeze()


def are_objects_frozen() -> bool:
    """Whether a collection skips the objects of libraries."""
    return bool(_frozen_by)


def freeze_more() -> None:
    """Exempt what was made since the run began, until it ends; nothing in a program that has frozen its objects, which
    nobody would thaw."""
    if "run" in _frozen_by:
        gc.freeze()
