"""The problems of a workflow, from two runs on one task with the same seed."""

from __future__ import annotations

from collections import Counter

from tunesmith.commands.check.branches import count_equal, describe_key, find_branches
from tunesmith.commands.check.observe import Observation
from tunesmith.commands.check.text_difference import quote_difference
from tunesmith.commands.doctor.finding import Evidence, Finding
from tunesmith.config import RunConfig
from tunesmith.types import Failure, StopReason

ENDINGS: dict[StopReason, str] = {
    "length": "raise model.max_tokens, or ask for shorter replies",
    "context": "raise model.max_model_len, or shorten the history",
    "deadline": "raise the request's deadline",
    "cancelled": "await every call before the workflow returns",
}
"""Stop reasons of replies that are incomplete, and what to change."""


def find_problems(first: Observation, second: Observation, *, config: RunConfig) -> list[Finding]:
    """All problems; those of a single run are read from the first."""
    found = [
        find_failure(first, config), find_refused_calls(first), find_late_calls(first), find_truncation(first),
        find_branches(first), find_blocking_code(first, second), find_differences(first, second),
    ]  # fmt: skip
    return [finding for finding in found if finding is not None]


def find_failure(run: Observation, config: RunConfig) -> Finding | None:
    """A rollout without a reward: none of its tokens is trained."""
    failure = run.trajectory.failure
    if failure is None:
        return None
    evidence = [Evidence(source=failure.line or failure.where, observed=failure.message)]
    return Finding(
        check="no-reward",
        severity="error",
        problem=f"the rollout has no reward ({failure.where}), so none of its tokens is trained",
        evidence=tuple(evidence),
        change=advise_on_failure(failure, config, has_turns=bool(run.trajectory.turns)),
    )


def advise_on_failure(failure: Failure, config: RunConfig, *, has_turns: bool) -> str:
    if failure.where == "timeout":
        return f"make the workflow faster, or raise rollout.timeout_s={config.rollout.timeout_s:g}"
    if failure.where == "engine":
        return "the sampler failed, see the message; the workflow is not the cause"
    if "returned a reward" in failure.message:
        return "return WorkflowOutput(reward=...) from the workflow, or name a judge (--judge, judge: in the run file)"
    if "JudgeOutput.reward is None" in failure.message:
        return "return a number from the judge; None means that it has no verdict"
    if failure.where == "judge":
        return "fix the judge at this line; a wrong answer is a low reward, not an error"
    if not has_turns:
        return "call the `model` that the workflow receives, or one of its clients, and see the refused calls"
    return "fix this line; where the model's reply caused the error, catch it and return a low reward"


def find_refused_calls(run: Observation) -> Finding | None:
    """Calls that the endpoint refused: nothing is sampled, so nothing is trained."""
    if not run.refused:
        return None
    counts = Counter((error.status, str(error)) for error in run.refused)
    return Finding(
        check="refused-calls",
        severity="warning",
        problem=f"{len(run.refused)} calls were refused, so nothing was sampled for them",
        evidence=tuple(
            Evidence(source=f"status {status}", observed=f"{message} ({number} times)", value=number)
            for (status, message), number in counts.items()
        ),
        change="change the request as the message says",
    )


def find_late_calls(run: Observation) -> Finding | None:
    """Calls after the workflow had returned; they are refused and not trained."""
    if not run.late:
        return None
    return Finding(
        check="late-calls",
        severity="warning",
        problem=f"{len(run.late)} calls came after the workflow had returned and were refused",
        evidence=(Evidence(source="status 401", observed=str(run.late[0]), value=len(run.late)),),
        change="await every task that calls the model before the workflow returns",
    )


def find_truncation(run: Observation) -> Finding | None:
    """Replies that did not end by themselves."""
    endings = Counter(turn.stop_reason for turn in run.trajectory.turns if turn.stop_reason in ENDINGS)
    if not endings:
        return None
    return Finding(
        check="truncation",
        severity="warning",
        problem=f"{sum(endings.values())} of {len(run.trajectory.turns)} replies are incomplete",
        evidence=tuple(
            Evidence(source=f"turn {number}", observed=f"{len(turn.sampled_ids)} tokens, ended by {turn.stop_reason}")
            for number, turn in enumerate(run.trajectory.turns, start=1)
            if turn.stop_reason in ENDINGS
        ),
        change="; ".join(ENDINGS[reason] for reason in endings),
    )


def find_blocking_code(first: Observation, second: Observation) -> Finding | None:
    """Synchronous code that stopped the event loop, and with it all other rollouts, in both runs.

    A stall of the machine, and what a library imports at its first call, is in one of them.
    """
    run = min(first, second, key=lambda each: len(each.blocked))
    if not run.blocked:
        return None
    return Finding(
        check="blocking-code",
        severity="warning",
        problem="the workflow or the judge blocks the event loop, so every other rollout waits and no timeout can fire",
        evidence=tuple(
            Evidence(source=step.line or "unknown line", observed=f"{step.seconds:.1f} s", value=step.seconds)
            for step in sorted(run.blocked, key=lambda step: -step.seconds)[:3]
        ),
        change="use an async client, or call it through asyncio.to_thread; or write the workflow as a plain function",
    )


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
