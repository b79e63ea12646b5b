"""Operators: from a judged trajectory to a new one. Each is an async function of a `FlywheelAttempt`.

    right parents   rollout            a new rollout of the question
                    rewrite_redundant  the first redundant step is replaced, and the policy continues
                    refine_thoughts    other thoughts, with calls, results and answer unchanged
    wrong parents   repair_flaw        the first flawed step is replaced, and the policy continues
                    hint_after_flaw    a hint after the flawed step, and the policy continues
                    hint_at_end        a hint at the end of the whole trajectory, and the policy continues
                    reflect            the author's reflection at the end, and the policy continues

Replaced calls are executed by the environment. A hint is forced text; what an author writes counts as written.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tunesmith.config import FlywheelConfig
from tunesmith.environments.environment import Environment
from tunesmith.environments.transcript import Transcript
from tunesmith.et_agent.flywheel.roles import (
    Goal,
    Role,
    RoleRequest,
    begin_thought,
    call_role,
    find_step,
    list_thoughts,
    reopen_end,
    replace_thoughts,
    split_steps,
    write_step,
)

GENERAL: tuple[str, ...] = (
    "Wait, I should go over this once more before I answer.",
    "Hold on, one of my steps may be wrong, so I check them in order.",
    "This may not be right yet, so I look at what the results really say.",
)
BY_TOOL: Mapping[str, tuple[str, ...]] = {
    "search": (
        "Wait, I should search again with a more precise query.",
        "The passages so far may not answer the question, so I look up what is missing.",
        "Maybe I searched for the wrong thing, so I try another query.",
    ),
    "python": (
        "Wait, I should check this with a short program.",
        "I may have made a mistake in the calculation, so I compute it with Python.",
        "I can verify this result by running code.",
    ),
    "calculator": ("Wait, I should compute this with the calculator.",),
}


def list_hints(tools: Collection[str], given: Sequence[str] = ()) -> tuple[str, ...]:
    """The hints for an environment: the given ones, or the built-in ones of its tools."""
    if given:
        return tuple(given)
    return (*GENERAL, *(hint for name in sorted(tools) for hint in BY_TOOL.get(name, ())))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlywheelAttempt:
    """One use of an operator: its inputs, and the roles bound to it."""

    row: Mapping[str, Any]
    environment: Environment
    config: FlywheelConfig
    parent: Transcript | None
    """The trajectory that the operator starts from; None for the first rollouts."""
    is_correct: bool
    """Whether the parent is right."""
    policy: Any
    analyst: Role
    author: Role
    hints: Sequence[str]
    rng: random.Random

    @property
    def question(self) -> str:
        return str(self.row["question"])

    def ask(self, goal: Goal, **fields: Any) -> RoleRequest:
        assert self.parent is not None
        return RoleRequest(
            goal=goal,
            row=self.row,
            transcript=self.parent,
            steps=split_steps(self.parent),
            is_correct=self.is_correct,
            environment=self.environment,
            **fields,
        )

    async def resume(self, prefix: Transcript) -> Transcript:
        """The policy continues a prefix, with the further calls and tokens of the config."""
        section = self.environment.config
        max_tokens = None if section.max_tokens is None else section.max_tokens + self.config.extra_tokens
        return await self.environment.run(
            self.question,
            self.policy,
            prefix=prefix,
            max_calls=section.max_calls + self.config.extra_calls,
            max_tokens=max_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The result of an operator."""

    transcript: Transcript | None = None
    """None if there was nothing to change."""
    step: int | None = None
    """The step that was replaced or commented."""
    reason: str = ""
    """The analyst's reason, or why there is no transcript."""


Operator = Callable[[FlywheelAttempt], Awaitable[Proposal]]


async def roll_out(attempt: FlywheelAttempt) -> Proposal:
    return Proposal(transcript=await attempt.environment.run(attempt.question, attempt.policy))


async def replace_step(attempt: FlywheelAttempt, *, goal: Goal, nothing: str) -> Proposal:
    """The steps before the one found, the author's step in its place, and what the policy makes of it."""
    found = await find_step(attempt.analyst, attempt.ask(goal))
    if found is None:
        return Proposal(reason=nothing)
    request = attempt.ask("replace_step", finding=found)
    draft = await call_role(attempt.author, request)
    if draft is None:
        return Proposal(step=found.step, reason="no replacement")
    prefix = request.transcript.cut(request.steps[found.step - 1].start)
    try:
        prefix = write_step(draft, prefix, attempt.environment)
    except ValueError as error:
        return Proposal(step=found.step, reason=str(error))
    finished = await attempt.resume(prefix) if prefix.finish is None else prefix
    return Proposal(transcript=finished, step=found.step, reason=found.reason)


async def refine_thoughts(attempt: FlywheelAttempt) -> Proposal:
    assert attempt.parent is not None
    thoughts = list_thoughts(attempt.parent)
    if not thoughts:
        return Proposal(reason="no thoughts in the format")
    texts = await call_role(attempt.author, attempt.ask("refine_thoughts", thoughts=tuple(thoughts)))
    if texts is None:
        return Proposal(reason="no refinement")
    if len(texts) != len(thoughts):
        return Proposal(reason=f"{len(texts)} thoughts for {len(thoughts)}")
    if list(texts) == thoughts:
        return Proposal(reason="the thoughts stay as they are")
    return Proposal(transcript=replace_thoughts(attempt.parent, [str(each) for each in texts]))


async def hint_after_flaw(attempt: FlywheelAttempt) -> Proposal:
    """After the last step there is nothing to continue, so its hint stands at the end of the trajectory."""
    request = attempt.ask("find_flaw")
    found = await find_step(attempt.analyst, request)
    if found is None:
        return Proposal(reason="no flawed step")
    hint = attempt.rng.choice(attempt.hints)
    step = request.steps[found.step - 1]
    if step.results:
        prefix = begin_thought(request.transcript.cut(step.end), hint, kind="forced")
    else:
        prefix = reopen_end(request.transcript, hint, kind="forced")
    return Proposal(transcript=await attempt.resume(prefix), step=found.step, reason=found.reason)


async def hint_at_end(attempt: FlywheelAttempt) -> Proposal:
    assert attempt.parent is not None
    prefix = reopen_end(attempt.parent, attempt.rng.choice(attempt.hints), kind="forced")
    return Proposal(transcript=await attempt.resume(prefix), step=len(split_steps(attempt.parent)))


async def reflect(attempt: FlywheelAttempt) -> Proposal:
    request = attempt.ask("reflect")
    text = await call_role(attempt.author, request)
    if not text:
        return Proposal(reason="no reflection")
    prefix = reopen_end(request.transcript, text, kind="thought")
    return Proposal(transcript=await attempt.resume(prefix), step=len(request.steps))


OPERATORS: Mapping[str, Operator] = {
    "rollout": roll_out,
    "rewrite_redundant": partial(replace_step, goal="find_redundant", nothing="no redundant step"),
    "refine_thoughts": refine_thoughts,
    "repair_flaw": partial(replace_step, goal="find_flaw", nothing="no flawed step"),
    "hint_after_flaw": hint_after_flaw,
    "hint_at_end": hint_at_end,
    "reflect": reflect,
}
FOR_CORRECT = ("rollout", "rewrite_redundant", "refine_thoughts")
