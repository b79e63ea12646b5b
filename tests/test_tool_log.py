"""Recorded tool calls: what a branch receives, what it repeats, and what passes through outside of branching."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager

import pytest

from tunesmith import replayable
from tunesmith.errors import ReplayError
from tunesmith.tool_log import CURRENT_LOG, ToolLog, record_call


@contextmanager
def recording(log: ToolLog):
    token = CURRENT_LOG.set(log)
    try:
        yield log
    finally:
        CURRENT_LOG.reset(token)


class Counter:
    """An async function that counts its calls."""

    def __init__(self, *results) -> None:
        self.results = list(results)
        self.num_calls = 0

    async def __call__(self):
        self.num_calls += 1
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def call(name, arguments, function, **options):
    return asyncio.run(record_call(name, arguments, function, **options))


def test_without_a_log_a_call_is_only_made():
    function = Counter(1, 2)
    assert [call("a", {}, function), call("a", {}, function)] == [1, 2]


def test_a_branch_receives_equal_calls_in_order_and_makes_all_others():
    with recording(ToolLog()) as parent:
        for arguments, result in (({"q": 1}, "x"), ({"q": 2}, "y"), ({"q": 1}, "z")):
            call("search", arguments, Counter(result))
    function = Counter("new", "newer")
    with recording(ToolLog(parent.calls)) as log:
        assert call("search", {"q": 1}, function) == "x"
        assert call("search", {"q": 1}, function) == "z"
        assert call("search", {"q": 1}, function) == "new"
        assert call("other", {"q": 2}, function) == "newer"
    assert (log.num_inherited, function.num_calls, len(log.calls)) == (2, 2, 4)


def test_results_are_copies():
    with recording(ToolLog()) as parent:
        result = call("search", {}, Counter(["x"]))
        result.append("changed by the parent")
    with recording(ToolLog(parent.calls)):
        received = call("search", {}, Counter())
        received.append("changed by the branch")
    with recording(ToolLog(parent.calls)):
        assert call("search", {}, Counter()) == ["x"]


def test_an_error_that_the_workflow_handled_is_raised_again():
    with recording(ToolLog()) as parent, pytest.raises(ValueError, match="bad query"):
        call("search", {}, Counter(ValueError("bad query")))
    function = Counter()
    with recording(ToolLog(parent.calls)), pytest.raises(ValueError, match="bad query"):
        call("search", {}, function)
    assert function.num_calls == 0


def test_calls_with_state_are_made_again_and_must_agree():
    with recording(ToolLog()) as parent:
        call("python", {}, Counter((1, "fast")), has_state=True)
    with recording(ToolLog(parent.calls)) as log:
        assert call("python", {}, Counter((1, "slow")), has_state=True, describe=lambda pair: pair[0]) == (1, "slow")
    assert (log.num_inherited, log.num_repeated) == (0, 1)
    with recording(ToolLog(parent.calls)), pytest.raises(ReplayError, match="'python' keeps state"):
        call("python", {}, Counter((2, "slow")), has_state=True, describe=lambda pair: pair[0])


def test_replayable_matches_arguments_however_they_are_passed():
    num_calls = 0

    @replayable
    async def search(query: str, top: int = 3) -> str:
        """Search."""
        nonlocal num_calls
        num_calls += 1
        return f"{query} {top}"

    with recording(ToolLog()) as parent:
        assert asyncio.run(search("x", 4)) == "x 4"
        assert asyncio.run(search("y")) == "y 3"
    with recording(ToolLog(parent.calls)):
        assert asyncio.run(search(top=4, query="x")) == "x 4"
        assert asyncio.run(search("y", 3)) == "y 3"
    assert num_calls == 2 and search.__doc__ == "Search."


def test_replayable_needs_an_async_function():
    with pytest.raises(ValueError, match="'plain' must be async"):

        @replayable
        def plain() -> None: ...
