"""The order in which test files are started: the longest first."""

from __future__ import annotations

import pytest

STARTED_FIRST = (
    "tests/recipes/test_et_agent_recipe.py",
    "tests/engine/test_random_load.py",
    "tests/trainer/losses/test_combinations.py",
    "tests/commands/tune/ranks/test_killed_ranks.py",
    "tests/trainer/sharding/test_rank_updates.py",
    "tests/commands/tune/ranks/test_ranks.py",
    "tests/commands/tune/algorithms/test_algorithm_runs.py",
    "tests/recipes/test_tool_agent_recipe.py",
    "tests/docs/test_readme.py",
    "tests/trainer/test_scoring_pass.py",
    "tests/commands/tune/test_resume.py",
    "tests/et_agent/flywheel/test_flywheel_runs.py",
    "tests/tools/python/test_escapes.py",
    "tests/tools/python/test_siblings.py",
    "tests/tools/python/test_python_session.py",
)
"""Files that take longest. If one of them were the last, one worker would run it while the others have ended."""


def put_long_files_first(items: list[pytest.Item]) -> None:
    """Sort tests in place."""
    items.sort(key=lambda item: find_place(item.path.as_posix()))


def find_place(path: str) -> int:
    """The place of a file among those that are started first; of all others, the place after them."""
    places = (place for place, name in enumerate(STARTED_FIRST) if path.endswith(name))
    return next(places, len(STARTED_FIRST))
