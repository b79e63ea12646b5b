"""The order in which test files are started: the longest first."""

from __future__ import annotations

import pytest

STARTED_FIRST = (
    "pipeline/rl/test_ranks.py",
    "pipeline/rl/test_killed_ranks.py",
    "pipeline/rl/test_resume.py",
    "pipeline/sft/test_sft_resume.py",
    "pipeline/rl/test_early_stopping.py",
    "recipes/test_et_agent_recipe.py",
    "docs/test_snippets.py",
    "pipeline/rl/test_callbacks.py",
    "pipeline/stages/test_pipeline.py",
    "pipeline/stages/test_rounds.py",
)
"""Files that take longest. If one of them were the last, one of two workers would wait for the other."""


def put_long_files_first(items: list[pytest.Item]) -> None:
    """Sort tests in place."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(STARTED_FIRST))
