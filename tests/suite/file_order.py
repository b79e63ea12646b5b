"""The order in which test files are started: the longest first."""

from __future__ import annotations

import pytest

STARTED_FIRST = (
    "docs/test_snippets.py",
    "engine/cuda/test_fx_passes.py",
    "commands/doctor/test_failing_runs.py",
    "commands/tune/algorithms/test_algorithm_runs.py",
    "commands/tune/test_early_stopping.py",
    "commands/tune/ranks/test_killed_ranks.py",
    "commands/tune/ranks/test_ranks.py",
    "commands/tune/test_resume.py",
    "trainer/losses/test_combinations.py",
    "trainer/layers/test_compiled_layers.py",
    "trainer/sharding/test_rank_updates.py",
)
"""Files that take longest. If one of them were the last, one of two workers would wait for the other."""


def put_long_files_first(items: list[pytest.Item]) -> None:
    """Sort tests in place."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(STARTED_FIRST))
