"""What analyst and author are asked, and what they return; prompts to models and Python functions have one interface.

A role is called with a `RoleRequest`. The analyst returns a `Finding`, or None if there is nothing. The author returns
a `StepDraft` (replace_step), the new thoughts (refine_thoughts), a text (reflect), or None if it has no proposal. A
function of a run file may be an ordinary or an async one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tunesmith.environments.environment import Environment
from tunesmith.environments.transcript import Segment, Transcript
from tunesmith.et_agent.flywheel.steps import Step

Goal = Literal["find_redundant", "find_flaw", "replace_step", "refine_thoughts", "reflect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A step with a fault."""

    step: int
    """Number of the step, from 1."""
    reason: str
    """What is wrong with it, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDraft:
    """A step that an author proposes; its call is really executed."""

    thought: str
    tool: str = ""
    """Name of the tool to call; empty for a final answer."""
    text: str
    """Input of the tool, or the final answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """What a role is asked about one trajectory."""

    goal: Goal
    row: Mapping[str, Any]
    """The question's row. Models are shown the question alone."""
    transcript: Transcript
    """The whole trajectory."""
    steps: tuple[Step, ...]
    is_correct: bool
    environment: Environment
    finding: Finding | None = None
    """For replace_step: the step to replace, and why."""
    thoughts: tuple[str, ...] = ()
    """For refine_thoughts: the thoughts."""


Role = Callable[[RoleRequest], Any]


async def call_role(role: Role, request: RoleRequest) -> Any:
    """The reply of a role."""
    reply = role(request)
    return await reply if inspect.isawaitable(reply) else reply


async def find_step(role: Role, request: RoleRequest) -> Finding | None:
    """The analyst's finding; ValueError if it names a step that does not exist."""
    found = await call_role(role, request)
    if found is None:
        return None
    if not isinstance(found, Finding):
        raise TypeError(f"the analyst must return a Finding or None, got {type(found).__name__}")
    if not 1 <= found.step <= len(request.steps):
        raise ValueError(f"the analyst names step {found.step} of a trajectory with {len(request.steps)} steps")
    return found


def write_step(draft: StepDraft, prefix: Transcript, environment: Environment) -> tuple[Segment, ...]:
    """The segments of a draft in the protocol of the environment; ValueError for an unknown tool or an empty text."""
    if not draft.text.strip():
        raise ValueError("the proposed step has an empty call or answer")
    if not draft.tool:
        return environment.protocol.write_answer(draft.thought, draft.text)
    if draft.tool not in environment.tools:
        raise ValueError(f"the proposed step calls {draft.tool!r}; the tools are {', '.join(environment.tools)}")
    number = len(prefix.calls) + prefix.refused_calls
    return environment.protocol.write_call(draft.thought, environment.tools[draft.tool], draft.text, number=number)
