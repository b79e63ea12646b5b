"""Fixtures of runs on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forked_ranks import ForkedRanks


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedRanks]:
    """Starts commands whose ranks need not import anything."""
    found = ForkedRanks(tmp_path_factory.mktemp("forks"))
    yield found
    found.close()
