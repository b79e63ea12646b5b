"""What analyst and author are asked, and what they return; prompts to models and Python functions have one interface.

A role is called with a `RoleRequest`. The analyst returns a `Finding`, or None if there is nothing. The author returns
a `StepDraft` (replace_step), the new thoughts (refine_thoughts), a text (reflect), or None if it has no proposal. A
function of a run file may be an ordinary or an async one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tunesmith.chat.parsers import THINK_CLOSE, THINK_OPEN
from tunesmith.environments.environment import Environment
from tunesmith.environments.transcript import ANSWER_CLOSE, ANSWER_OPEN, Segment, Transcript

WRITTEN = ("thought", "forced")
THOUGHT = re.compile(r"(\s*(?:<think>)?\s*)(.*?)(\s*</think>\s*)", re.DOTALL)
"""A thought of the protocol `tags`: opening, text, closing."""
CLOSED = re.compile(r"\s*</think>\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step: segments `start` to `end - 1` of a transcript."""

    number: int
    """From 1."""
    start: int
    end: int
    thought: str
    """Without tags."""
    calls: tuple[Segment, ...]
    results: tuple[Segment, ...]
    answer: Segment | None


def split_steps(transcript: Transcript) -> tuple[Step, ...]:
    """The steps of a transcript; their segments are all of its segments."""
    segments = transcript.segments
    ends = [
        place + 1
        for place, segment in enumerate(segments)
        if segment.kind == "result" and (place + 1 == len(segments) or segments[place + 1].kind != "result")
    ]
    if segments and (not ends or ends[-1] < len(segments)):
        ends.append(len(segments))
    steps, start = [], 0
    for number, end in enumerate(ends, 1):
        steps.append(build_step(segments[start:end], number=number, start=start))
        start = end
    return tuple(steps)


def build_step(segments: Sequence[Segment], *, number: int, start: int) -> Step:
    return Step(
        number=number,
        start=start,
        end=start + len(segments),
        thought=strip_tags("".join(each.text for each in segments if each.kind in WRITTEN)),
        calls=tuple(each for each in segments if each.kind == "call"),
        results=tuple(each for each in segments if each.kind == "result"),
        answer=next((each for each in segments if each.kind == "answer"), None),
    )


def strip_tags(text: str) -> str:
    """A thought without its tags; letters keep their case."""
    return text.replace(THINK_OPEN, " ").replace(THINK_CLOSE, " ").strip()


def list_thoughts(transcript: Transcript) -> list[str] | None:
    """The texts of all thoughts, without tags; None if one is not written in the format."""
    found = [split_thought(each, transcript) for each in transcript.segments if each.kind == "thought"]
    return None if None in found else [parts[1] for parts in found if parts is not None]


def replace_thoughts(transcript: Transcript, texts: Sequence[str]) -> Transcript:
    """The transcript with other thoughts; every other segment is the same object. ValueError for another number."""
    thoughts = iter(texts)
    segments = []
    for segment in transcript.segments:
        parts = split_thought(segment, transcript) if segment.kind == "thought" else None
        if parts is None:
            segments.append(segment)
            continue
        text = next(thoughts, None)
        if text is None:
            raise ValueError("there are fewer new thoughts than thoughts")
        is_same = text == parts[1]
        segments.append(segment if is_same else replace(segment, text=parts[0] + text + parts[2], tokens=0))
    if next(thoughts, None) is not None:
        raise ValueError("there are more new thoughts than thoughts")
    return replace(transcript, segments=tuple(segments))


def split_thought(segment: Segment, transcript: Transcript) -> tuple[str, str, str] | None:
    """Opening, text and closing of a thought; None if it is not in the format."""
    if transcript.protocol == "native":
        return "", segment.text, ""
    found = THOUGHT.fullmatch(segment.text)
    if found is None or THINK_OPEN in found[2] or THINK_CLOSE in found[2]:
        return None
    return found[1], found[2], found[3]


def begin_thought(transcript: Transcript, text: str, *, kind: Literal["thought", "forced"]) -> Transcript:
    """A transcript that ends with a result, continued with a thought that begins with the text and is not closed."""
    opened = f"{THINK_OPEN}{text} " if transcript.protocol == "tags" else f"{text} "
    return replace(transcript.append(Segment(kind=kind, text=opened)), finish=None)


def reopen_end(transcript: Transcript, text: str, *, kind: Literal["thought", "forced"]) -> Transcript:
    """The whole transcript with the text appended to its last thought, which is left open.

    A final answer becomes part of the thought. A transcript without an answer keeps all its steps; calls at its end
    that were never run are left out.
    """
    segments = list(transcript.segments)
    open_calls = {call.call_id for call in transcript.open_calls}
    while segments and segments[-1].kind == "call" and segments[-1].call_id in open_calls:
        segments.pop()
    answer = segments.pop() if segments and segments[-1].kind == "answer" else None
    if transcript.protocol == "native":
        if answer is not None:
            segments.append(replace(answer, kind="thought"))
        separator = " " if segments and segments[-1].kind != "result" else ""
        added = Segment(kind=kind, text=f"{separator}{text} ")
        return replace(transcript, segments=(*segments, added), finish=None)
    stated = "" if answer is None else answer.text.replace(ANSWER_OPEN, "").replace(ANSWER_CLOSE, "").strip()
    if not segments or segments[-1].kind not in WRITTEN:
        base = replace(transcript, segments=tuple(segments))
        return begin_thought(base, f"{stated} {text}".strip(), kind=kind)
    last = segments[-1]
    segments[-1] = replace(last, text=CLOSED.sub("", last.text) + (f" {stated}" if stated else ""))
    base = replace(transcript, segments=tuple(segments), finish=None)
    opening = " " if is_open(base.open_text) else f"\n{THINK_OPEN}"
    return base.append(Segment(kind=kind, text=f"{opening}{text} "))


def is_open(text: str) -> bool:
    """Whether a thought is open at the end of the text of a step."""
    return text.rfind(THINK_OPEN) > text.rfind(THINK_CLOSE)


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
