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
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.config import FlywheelConfig
from tunesmith.environments.environment import Environment
from tunesmith.environments.transcript import Transcript
from tunesmith.et_agent.flywheel.roles import (
    Finding,
    Goal,
    Role,
    RoleRequest,
    StepDraft,
    call_role,
    find_step,
    write_step,
)
from tunesmith.et_agent.flywheel.steps import (
    begin_thought,
    list_thoughts,
    reopen_end,
    replace_thoughts,
    split_steps,
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


def draw_hint(hints: Sequence[str], rng: random.Random) -> str:
    """One whole sentence."""
    return rng.choice(list(hints))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """The trajectory that an operator starts from."""

    transcript: Transcript
    is_correct: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FlywheelAttempt:
    """One use of an operator: its inputs, and the roles bound to it."""

    row: Mapping[str, Any]
    environment: Environment
    config: FlywheelConfig
    parent: Parent | None
    """None for the first rollouts."""
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
        transcript = self.parent.transcript
        return RoleRequest(
            goal=goal,
            row=self.row,
            transcript=transcript,
            steps=split_steps(transcript),
            is_correct=self.parent.is_correct,
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


async def rewrite_redundant(attempt: FlywheelAttempt) -> Proposal:
    found = await find_step(attempt.analyst, attempt.ask("find_redundant"))
    if found is None:
        return Proposal(reason="no redundant step")
    return await replace_step(attempt, found)


async def repair_flaw(attempt: FlywheelAttempt) -> Proposal:
    found = await find_step(attempt.analyst, attempt.ask("find_flaw"))
    if found is None:
        return Proposal(reason="no flawed step")
    return await replace_step(attempt, found)


async def replace_step(attempt: FlywheelAttempt, found: Finding) -> Proposal:
    """The steps before the one found, the author's step in its place, and what the policy makes of it."""
    request = attempt.ask("replace_step", finding=found)
    draft = await call_role(attempt.author, request)
    if draft is None:
        return Proposal(step=found.step, reason="no replacement")
    if not isinstance(draft, StepDraft):
        raise TypeError(f"the author must return a StepDraft or None for replace_step, got {type(draft).__name__}")
    prefix = request.transcript.cut(request.steps[found.step - 1].start)
    try:
        prefix = prefix.append(*write_step(draft, prefix, attempt.environment))
    except ValueError as error:
        return Proposal(step=found.step, reason=str(error))
    finished = replace(prefix, finish="answered") if not draft.tool else await attempt.resume(prefix)
    return Proposal(transcript=finished, step=found.step, reason=found.reason)


async def refine_thoughts(attempt: FlywheelAttempt) -> Proposal:
    assert attempt.parent is not None
    thoughts = list_thoughts(attempt.parent.transcript)
    if not thoughts:
        return Proposal(reason="no thoughts in the format")
    texts = await call_role(attempt.author, attempt.ask("refine_thoughts", thoughts=tuple(thoughts)))
    if texts is None:
        return Proposal(reason="no refinement")
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"the author must return a list of thoughts or None, got {type(texts).__name__}")
    if len(texts) != len(thoughts):
        return Proposal(reason=f"{len(texts)} thoughts for {len(thoughts)}")
    if list(texts) == thoughts:
        return Proposal(reason="the thoughts stay as they are")
    return Proposal(transcript=replace_thoughts(attempt.parent.transcript, [str(each) for each in texts]))


async def hint_after_flaw(attempt: FlywheelAttempt) -> Proposal:
    """After the last step there is nothing to continue, so its hint stands at the end of the trajectory."""
    request = attempt.ask("find_flaw")
    found = await find_step(attempt.analyst, request)
    if found is None:
        return Proposal(reason="no flawed step")
    hint = draw_hint(attempt.hints, attempt.rng)
    step = request.steps[found.step - 1]
    if step.results:
        prefix = begin_thought(request.transcript.cut(step.end), hint, kind="forced")
    else:
        prefix = reopen_end(request.transcript, hint, kind="forced")
    return Proposal(transcript=await attempt.resume(prefix), step=found.step, reason=found.reason)


async def hint_at_end(attempt: FlywheelAttempt) -> Proposal:
    assert attempt.parent is not None
    prefix = reopen_end(attempt.parent.transcript, draw_hint(attempt.hints, attempt.rng), kind="forced")
    return Proposal(transcript=await attempt.resume(prefix), step=len(split_steps(attempt.parent.transcript)))


async def reflect(attempt: FlywheelAttempt) -> Proposal:
    request = attempt.ask("reflect")
    text = await call_role(attempt.author, request)
    if not text:
        return Proposal(reason="no reflection")
    if not isinstance(text, str):
        raise TypeError(f"the author must return a text or None for reflect, got {type(text).__name__}")
    prefix = reopen_end(request.transcript, text, kind="thought")
    return Proposal(transcript=await attempt.resume(prefix), step=len(request.steps))


OPERATORS: Mapping[str, Operator] = {
    "rollout": roll_out,
    "rewrite_redundant": rewrite_redundant,
    "refine_thoughts": refine_thoughts,
    "repair_flaw": repair_flaw,
    "hint_after_flaw": hint_after_flaw,
    "hint_at_end": hint_at_end,
    "reflect": reflect,
}
FOR_CORRECT = ("rollout", "rewrite_redundant", "refine_thoughts")
