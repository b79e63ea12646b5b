"""Fixtures of runs on several ranks."""

from __future__ import annotations

import pytest

from forked_programs import ForkedPrograms, start_forked_programs


@pytest.fixture(scope="session")
def forks() -> ForkedPrograms:
    """Starts commands whose ranks need not import anything."""
    return start_forked_programs()
