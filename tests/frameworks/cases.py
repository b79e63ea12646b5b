"""Cases of a framework: an agent that uses one feature, what the scripted policy replies, and what must be recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FEATURES = {
    "sub_agents": "handoffs, sub-agents",
    "parallel_calls": "parallel tool calls",
    "structured": "structured output",
    "streaming": "streaming",
    "retries": "retries",
    "compaction": "compaction",
}
"""Feature -> its name in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hanging:
    """A reply whose tokens are sampled, but whose end the caller never sees."""

    text: str


Reply = str | Hanging


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One agent, run on a task whose answer is 5."""

    feature: str
    workflow: Callable[..., Any]
    replies: tuple[Reply, ...]
    """What the policy replies to the calls of a trajectory; the last reply repeats."""
    num_turns: int
    num_branches: int
    """Training samples of a trajectory beyond the first."""


def write_call(name: str, **arguments: Any) -> str:
    """A tool call in the format of the pocket model's template."""
    return write_calls((name, arguments))


def write_calls(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>{body}</tool_call>" for body in bodies)


ADD = write_call("add", a=2, b=3)
ADD_TWICE = write_calls(("add", {"a": 2, "b": 3}), ("add", {"a": 1, "b": 4}))
ANSWER = "The sum is 5."
