"""Objects that the garbage collector leaves alone are thawed at the end of a run, whatever the interpreter froze."""

from __future__ import annotations

import gc
import weakref

import pytest

from tunesmith import garbage
from tunesmith.garbage import are_objects_frozen, freeze_more, frozen_objects


@pytest.fixture(autouse=True)
def thawed(monkeypatch):
    """A program that has frozen nothing, as this one has."""
    num_before = gc.get_freeze_count()
    gc.unfreeze()
    monkeypatch.setattr(garbage, "_frozen_by", set())
    yield
    gc.unfreeze()
    if num_before:
        gc.freeze()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def freeze_a_cycle() -> weakref.ref[Cycle]:
    cycle = Cycle()
    freeze_more()
    return weakref.ref(cycle)


@pytest.mark.parametrize("num_of_interpreter", [0, 375])
def test_what_a_run_froze_is_collected_after_it(num_of_interpreter, monkeypatch):
    count = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: count() + num_of_interpreter)
    for _ in range(2):
        with frozen_objects():
            assert are_objects_frozen() and count() > 0
            left = freeze_a_cycle()
            gc.collect()
            assert left() is not None, "frozen"
        assert not are_objects_frozen() and count() == 0
        gc.collect()
        assert left() is None


def test_objects_stay_frozen_if_the_program_froze_them_and_no_others():
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    for _ in range(2):
        with frozen_objects(), frozen_objects():
            assert are_objects_frozen()
            left = freeze_a_cycle()
        gc.collect()
        assert left() is None and 0 < gc.get_freeze_count() <= num_frozen
