"""The order in which test files are started: the longest first."""

from __future__ import annotations

import pytest

STARTED_FIRST = (
    "tests/commands/tune/test_resume.py",
    "tests/commands/tune/ranks/test_killed_ranks.py",
    "tests/trainer/sharding/test_rank_updates.py",
    "tests/docs/test_readme.py",
    "tests/recipes/test_et_agent_recipe.py",
    "tests/trainer/layers/test_compiled_layers.py",
    "tests/engine/cuda/test_recurrent_fusion.py",
    "tests/trainer/losses/test_combinations.py",
    "tests/docs/test_snippets.py",
    "tests/trainer/test_gradients.py",
    "tests/commands/sft/test_sft_resume.py",
    "tests/commands/tune/ranks/test_ranks.py",
    "tests/engine/test_random_load.py",
    "tests/judges/test_expression_process.py",
    "tests/cli/test_startup.py",
    "tests/commands/tune/test_staleness_runs.py",
    "tests/recipes/test_tool_agent_recipe.py",
    "tests/environments/test_mcp_tools.py",
    "tests/tools/python/test_escapes.py",
    "tests/trainer/test_scoring_pass.py",
    "tests/commands/tune/test_tune.py",
    "tests/tools/python/test_siblings.py",
)
"""Files that take longest. If one of them were the last, one worker would run it while the others have ended."""


def put_long_files_first(items: list[pytest.Item]) -> None:
    """Sort tests in place."""
    items.sort(key=lambda item: find_place(item.path.as_posix()))


def find_place(path: str) -> int:
    """The place of a file among those that are started first; of all others, the place after them."""
    places = (place for place, name in enumerate(STARTED_FIRST) if path.endswith(name))
    return next(places, len(STARTED_FIRST))
