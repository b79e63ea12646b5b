"""Differences between two runs with the same seed: what the workflow takes from clocks, random numbers or the order of
events."""

from __future__ import annotations

from tunesmith.commands.check.branches import count_equal, describe_key
from tunesmith.commands.check.observe import Observation
from tunesmith.commands.check.text_difference import quote_difference
from tunesmith.commands.doctor.finding import Evidence, Finding

PROMPTS = (
    "take the date, random numbers and ids from the task or from a generator seeded by it, and sort what has no order"
)


def find_differences(first: Observation, second: Observation) -> Finding | None:
    """The first prompt, reply or reward that differs between the runs."""
    for one, other in zip(first.calls, second.calls, strict=False):
        if one.prompt_ids != other.prompt_ids:
            number = count_equal(one.keys, other.keys)
            if number == min(len(one.keys), len(other.keys)):
                observed = f"the number of messages or the tools: {len(one.keys)} and {len(other.keys)} messages"
            else:
                shown = quote_difference(describe_key(one.keys[number]), describe_key(other.keys[number]))
                observed = f"message {number + 1}: first run {shown[0]}, second run {shown[1]}"
            return _report(f"call {one.index + 1} has another prompt", f"call {one.index + 1}", observed, PROMPTS)
    turns = (first.trajectory.turns, second.trajectory.turns)
    for number, (turn, again) in enumerate(zip(*turns, strict=False), start=1):
        if turn.sampled_ids != again.sampled_ids:
            observed = f"{len(turn.sampled_ids)} and {len(again.sampled_ids)} tokens for the same prompt"
            change = "await concurrent calls in a fixed order, and cancel none by a clock"
            return _report(f"turn {number} has another reply", f"turn {number}", observed, change)
    if len(first.calls) != len(second.calls):
        observed = f"{len(first.calls)} and {len(second.calls)} calls"
        return _report("the number of calls differs", "calls", observed, PROMPTS)
    rewards = (first.trajectory.reward, second.trajectory.reward)
    if rewards[0] != rewards[1]:
        observed = f"{rewards[0]} and {rewards[1]} for the same conversation"
        return _report("the reward differs", "reward", observed, "make the judge a function of task and response")
    return None


def _report(what: str, source: str, observed: str, change: str) -> Finding:
    return Finding(
        check="repetition",
        severity="warning",
        problem=f"{what} when the workflow runs again with the same seed, so runs cannot be repeated and the "
        "members of a group differ by more than what the model samples",
        evidence=(Evidence(source=source, observed=observed),),
        change=change,
    )
