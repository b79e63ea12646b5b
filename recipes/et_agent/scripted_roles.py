"""Analyst and author without a model, for small models that cannot review their own work, and for tests.

They compare calls and results of the structured trajectory; they do not read language and do not know the answer. What
they find is exact where questions name what has to be looked up and results state the facts, as in the fictional
world (`recipes.world`): a repeated call, a failed call, a call whose result is not used later. Elsewhere use a model.
Name them in a run file as `recipes/et_agent/scripted_roles.py:analyst` and `...:author`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tunesmith.environments.transcript import Segment, Transcript
from tunesmith.et_agent.flywheel.roles import Finding, RoleRequest, Step, StepDraft
from tunesmith.judges.squad import read_prediction

WORD = re.compile(r"\w+")
NAME = re.compile(r"[A-Z]\w*(?: (?:[A-Z]\w*|of|the))* [A-Z]\w*|[A-Z]\w*")
SENTENCE = re.compile(r"[^.!?]+[.!?]*\s*")
FILLERS = {"A", "I", "It", "The", "This"}
CHECK = "I go over my steps again."


def analyst(request: RoleRequest) -> Finding | None:
    """The first step that is redundant, or of a wrong trajectory the first one that does not help."""
    steps = request.steps
    for index, step in enumerate(steps):
        reason = find_waste(steps, index, request.transcript)
        if reason:
            return Finding(step=step.number, reason=reason)
    if request.goal == "find_redundant" or not steps:
        return None
    if not any(step.calls for step in steps):
        return Finding(step=steps[-1].number, reason="it answers without a call")
    return Finding(step=steps[-1].number, reason="it draws the wrong conclusion")


def find_waste(steps: Sequence[Step], index: int, transcript: Transcript) -> str:
    """Why the calls of a step are wasted; empty if they are not, or if it has none."""
    step = steps[index]
    if not step.calls:
        return ""
    if any(not each.ok for each in step.results):
        return "its call failed"
    earlier = {describe_call(call) for each in steps[:index] for call in each.calls}
    if all(describe_call(call) in earlier for call in step.calls):
        return "it repeats an earlier call"
    known = list_words(transcript.question, *(call.text for call in step.calls))
    new = list_words(*(each.result for each in step.results)) - known
    later = list_words(*(text for each in steps[index + 1 :] for text in list_written(each)))
    return "" if new & later else "its result is not used"


def describe_call(call: Segment) -> str:
    """Equal for calls of one tool with equal arguments, spaces and case aside."""
    text = json.dumps(call.arguments, sort_keys=True) if call.arguments is not None else call.text
    return f"{call.tool} {' '.join(text.lower().split())}"


def list_written(step: Step) -> list[str]:
    return [step.thought, *(call.text for call in step.calls), step.answer.text if step.answer else ""]


def list_words(*texts: str) -> set[str]:
    """Numbers and capitalized words of texts, which carry the facts."""
    return {word for text in texts for word in WORD.findall(text) if word[0].isdigit() or word[0].isupper()}


def author(request: RoleRequest) -> StepDraft | list[str] | str | None:
    """A step, shorter thoughts, or a reflection."""
    if request.goal == "refine_thoughts":
        return drop_repeated_sentences(request.thoughts)
    if request.goal == "reflect":
        found = analyst(request)
        return CHECK if found is None else f"{CHECK} In step {found.step} {found.reason}."
    assert request.finding is not None
    index = request.finding.step - 1
    if not request.is_correct:
        return look_up_name(request, index)
    after = request.steps[index + 1 :]
    has_evidence = any(each.ok for step in request.steps[:index] for each in step.results)
    if not after or (after[0].answer is not None and not has_evidence):
        return None  # an answer without any result would be a guess
    return copy_action(after[0])


def copy_action(step: Step) -> StepDraft | None:
    """The thought and the action of a step, to take the place of the one before it."""
    if step.answer is not None:
        return StepDraft(thought=step.thought, text=read_prediction(step.answer.text))
    if not step.calls or step.calls[0].arguments is None:
        return None
    call = step.calls[0]
    assert call.arguments is not None
    values = list(call.arguments.values())
    text = values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(call.arguments)
    return StepDraft(thought=step.thought, tool=call.tool, text=text)


def look_up_name(request: RoleRequest, index: int) -> StepDraft | None:
    """A search for the longest name of the question that no earlier step searched for; None without one."""
    if "search" not in request.environment.tools:
        return None
    question = request.transcript.question
    names = [found[0] for found in NAME.finditer(question) if found.start() > 0]
    done = " ".join(call.text for step in request.steps[:index] for call in step.calls)
    left = [name for name in names if name not in done]
    if not left:
        return None
    name = max(left, key=len)
    return StepDraft(thought=f"I look up {name}.", tool="search", text=name)


def drop_repeated_sentences(thoughts: Sequence[str]) -> list[str]:
    """The thoughts without sentences that state nothing new: said in an earlier thought, or of names and numbers that
    stand in an earlier sentence of the same one. A thought keeps its first sentence that is new, or its last one."""
    seen: set[str] = set()
    refined = []
    for thought in thoughts:
        sentences = [each.strip() for each in SENTENCE.findall(thought) if each.strip()]
        kept: list[str] = []
        for sentence in sentences:
            facts = list_words(sentence) - FILLERS
            if sentence not in seen and (not kept or not facts or facts - list_words(*kept)):
                kept.append(sentence)
        seen.update(sentences)
        refined.append(" ".join(kept or sentences[-1:]))
    return refined
