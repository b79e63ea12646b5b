"""Whether a transcript keeps to the format of its protocol.

Tags: each step begins with `<think>` and ends with a call or with the answer; tags are balanced and not nested; the
model writes no `<result>`; the answer has a `\\boxed{}`. Native: every call could be read, and the final message has a
`\\boxed{}`.
"""

from __future__ import annotations

import re

from tunesmith.environments.transcript import Segment, Transcript

TAG = re.compile(r"</?(?:think|result|answer|tool_call)>")
THOUGHT = re.compile(r"\s*(?:<think>(?:(?!</?\w[\w-]*>).)*</think>\s*)+", re.DOTALL)
UNREADABLE = ("arguments", "unknown_tool")


def find_format_error(transcript: Transcript) -> str | None:
    """What is wrong with the format, in one sentence; None if nothing is."""
    if transcript.finish != "answered":
        return f"there is no answer: {transcript.finish}"
    answer = transcript.segments[-1].text
    if "\\boxed{" not in answer or not transcript.answer:
        return "the answer has no \\boxed{}"
    if transcript.protocol == "native":
        unreadable = [each for each in transcript.segments if each.failure in UNREADABLE]
        return f"a call of {unreadable[0].tool!r} cannot be read" if unreadable else None
    steps: list[list[Segment]] = [[]]
    for segment in transcript.segments:
        if segment.kind == "result":
            steps.append([])
        else:
            steps[-1].append(segment)
    return next((error for number, step in enumerate(steps, 1) if (error := find_step_error(step, number))), None)


def find_step_error(step: list[Segment], number: int) -> str | None:
    """What is wrong with one step of tags: thoughts, then a call or the answer."""
    text, last = "".join(each.text for each in step), step[-1] if step else None
    name = "answer" if last is None or last.kind == "answer" else last.tool
    thoughts, opening, rest = text.rpartition(f"<{name}>")
    if not opening or not THOUGHT.fullmatch(thoughts):
        return f"step {number} is not <think>...</think> followed by <{name}>"
    body = rest.removesuffix(f"</{name}>")
    if last is not None and last.kind == "call" and last.arguments is None:
        return f"the call of step {number} is empty or cannot be read"
    if TAG.search(body) and name == "answer":
        return f"step {number} has a tag inside of <{name}>"
    return None
