"""The problems of a workflow, from two runs on one task with the same seed.

Of each run it keeps what the checks read: the trajectory, its requests, and code that blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.chat.messages import MatchKey
from tunesmith.commands.doctor.record import CheckFinding, Evidence, name_findings
from tunesmith.config import RunConfig
from tunesmith.rollout.actors import Actors, serve_models
from tunesmith.rollout.openai_server.completion import PendingChatCompletion, PendingTextCompletion
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.recording.recorder import ObservedConversation, Recorder, Session, SessionCall
from tunesmith.rollout.runner import run_trajectory
from tunesmith.rollout.service import ModelService, RecordedCalls
from tunesmith.rollout.watchdog import MIN_BLOCKED_S, BlockedTime, EventLoopWatchdog
from tunesmith.runs.policy import BuildModel, Policy, build_sampling
from tunesmith.types import Failure, StopReason, Task, Trajectory, count_equal

LATE_CALLS_S = 0.5
"""Time after the rollout in which calls of its background tasks are still noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """Code of the workflow or the judge that ran between two awaits for long."""

    seconds: float
    line: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One run of the workflow."""

    trajectory: Trajectory
    calls: tuple[SessionCall, ...]
    """Admitted chat calls in order of arrival."""
    conversations: tuple[ObservedConversation, ...]
    refused: tuple[ApiError, ...]
    late: tuple[ApiError, ...]
    """Refused because the workflow had ended."""
    blocked: tuple[Blocked, ...]


class BlockingLog(EventLoopWatchdog):
    """A watchdog that keeps each long step with its line and logs nothing."""

    def __init__(self) -> None:
        logger = logging.getLogger("tunesmith.check")
        logger.propagate = False
        logger.addHandler(logging.NullHandler())
        super().__init__(logger, MIN_BLOCKED_S / 2)
        self.steps: list[Blocked] = []

    def record_step(self, run: BlockedTime, seconds: float) -> None:
        before, line = run.blocked_s, self._blocking_line
        super().record_step(run, seconds)
        if run.blocked_s > before:
            self.steps.append(Blocked(seconds=seconds, line=line))


async def observe_rollout(
    config: RunConfig, task: Task, *, policy: Policy, actors: Actors, build_model: BuildModel
) -> Observation:
    """Run the agent once with the seed of the config, from an empty prefix cache.

    Without a dispatcher: the rollout has an endpoint and a watchdog of its own, which keep what a run does not.
    """
    policy.engine.resume(0)
    service = ModelService(
        policy.engine,
        policy.service.recorder.renderer,
        model_name=config.model.path,
        sampling=build_sampling(config.model),
        build_model=lambda endpoint: build_model(endpoint, {}),
        build_endpoint=LoggedEndpoint,
    )
    endpoint, sessions = service.endpoint, list[RecordedCalls]()
    assert isinstance(endpoint, LoggedEndpoint)
    async with serve_models(replace(actors, service=service)):
        with BlockingLog().watching() as watchdog:
            trajectory = await run_trajectory(
                task, 0, agent=actors.agent, model=service, auxiliary_models=actors.auxiliary_models, seed=config.seed,
                watchdog=watchdog, prepare=sessions.append,
            )  # fmt: skip
        await asyncio.sleep(LATE_CALLS_S)
    policy.engine.pause()
    session = sessions[-1]
    assert isinstance(session, Session)
    return Observation(
        trajectory=trajectory,
        calls=tuple(sorted(endpoint.calls, key=lambda call: call.index)),
        conversations=session.list_conversations(),
        refused=tuple(error for error in endpoint.refused if error.status != 401),
        late=tuple(error for error in endpoint.refused if error.status == 401),
        blocked=tuple(watchdog.steps),
    )


class LoggedEndpoint(ChatEndpoint):
    """A `ChatEndpoint` with a log; used for one rollout at a time."""

    def __init__(self, recorder: Recorder, *, model_name: str) -> None:
        super().__init__(recorder, model_name=model_name)
        self.calls: list[SessionCall] = []
        """Admitted chat calls, in the order in which they were admitted."""
        self.refused: list[ApiError] = []

    @contextlib.contextmanager
    def _log_refusal(self) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            self.refused.append(error)
            raise

    def find_session(self, key: str | None) -> Session:
        with self._log_refusal():
            return super().find_session(key)

    async def admit(self, session: Session, fields: Any, **options: Any) -> PendingChatCompletion:
        with self._log_refusal():
            pending = await super().admit(session, fields, **options)
        self.calls.append(pending.call)
        return pending

    async def admit_text(self, session: Session, fields: Any) -> PendingTextCompletion:
        with self._log_refusal():
            return await super().admit_text(session, fields)


ENDINGS: dict[StopReason, str] = {
    "length": "raise model.max_tokens, or ask for shorter replies",
    "context": "raise model.max_model_len, or shorten the history",
    "cancelled": "await every call before the workflow returns",
}
"""Stop reasons of replies that are incomplete, and what to change."""


def find_problems(first: Observation, second: Observation, *, timeout_s: float) -> tuple[CheckFinding, ...]:
    """All problems, most severe first; those of a single run are read from the first."""
    return name_findings(
        {
            "no-reward": find_failure(first, timeout_s),
            "refused-calls": find_refused_calls(first),
            "late-calls": find_late_calls(first),
            "truncation": find_truncation(first),
            "branches": find_branches(first),
            "blocking-code": find_blocking_code(first, second),
            "repetition": find_differences(first, second),
        }
    )


def find_failure(run: Observation, timeout_s: float) -> CheckFinding | None:
    """A rollout without a reward: none of its tokens is trained."""
    failure = run.trajectory.failure
    if failure is None:
        return None
    return CheckFinding(
        severity="error",
        problem=f"the rollout has no reward ({failure.where}), so none of its tokens is trained",
        evidence=(Evidence(source=failure.line or failure.where, observed=failure.message),),
        change=advise_on_failure(failure, timeout_s, has_turns=bool(run.trajectory.turns)),
    )


def advise_on_failure(failure: Failure, timeout_s: float, *, has_turns: bool) -> str:
    if failure.where == "timeout":
        return f"make the workflow faster, or raise rollout.timeout_s={timeout_s:g}"
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


def find_refused_calls(run: Observation) -> CheckFinding | None:
    """Calls that the endpoint refused: nothing is sampled, so nothing is trained."""
    if not run.refused:
        return None
    counts = Counter((error.status, str(error)) for error in run.refused)
    return CheckFinding(
        problem=f"{len(run.refused)} calls were refused, so nothing was sampled for them",
        evidence=tuple(
            Evidence(source=f"status {status}", observed=f"{message} ({number} times)", value=number)
            for (status, message), number in counts.items()
        ),
        change="change the request as the message says",
    )


def find_late_calls(run: Observation) -> CheckFinding | None:
    """Calls after the workflow had returned; they are refused and not trained."""
    if not run.late:
        return None
    return CheckFinding(
        problem=f"{len(run.late)} calls came after the workflow had returned and were refused",
        evidence=(Evidence(source="status 401", observed=str(run.late[0]), value=len(run.late)),),
        change="await every task that calls the model before the workflow returns",
    )


def find_truncation(run: Observation) -> CheckFinding | None:
    """Replies that did not end by themselves."""
    endings = Counter(turn.stop_reason for turn in run.trajectory.turns if turn.stop_reason in ENDINGS)
    if not endings:
        return None
    return CheckFinding(
        problem=f"{sum(endings.values())} of {len(run.trajectory.turns)} replies are incomplete",
        evidence=tuple(
            Evidence(source=f"turn {number}", observed=f"{len(turn.sampled_ids)} tokens, ended by {turn.stop_reason}")
            for number, turn in enumerate(run.trajectory.turns, start=1)
            if turn.stop_reason in ENDINGS
        ),
        change="; ".join(ENDINGS[reason] for reason in endings),
    )


def find_blocking_code(first: Observation, second: Observation) -> CheckFinding | None:
    """Synchronous code that stopped the event loop, and with it all other rollouts, in both runs.

    A stall of the machine, and what a library imports at its first call, is in one of them.
    """
    run = min(first, second, key=lambda each: len(each.blocked))
    if not run.blocked:
        return None
    return CheckFinding(
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


def find_differences(first: Observation, second: Observation) -> CheckFinding | None:
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


def _report(what: str, source: str, observed: str, change: str) -> CheckFinding:
    return CheckFinding(
        problem=f"{what} when the workflow runs again with the same seed, so runs cannot be repeated and the "
        "members of a group differ by more than what the model samples",
        evidence=(Evidence(source=source, observed=observed),),
        change=change,
    )


MAX_SHOWN = 5
CHANGE = (
    "append to the history and send every reply back as it came; each branch is a sample of its own, whose prompt is "
    "computed again. Sub-agents and several samples of one prompt branch by design"
)


def find_branches(run: Observation) -> CheckFinding | None:
    """Calls after the first whose prompt extends no recorded turn."""
    starts = [call for call in run.calls[1:] if not is_extension(call, run)]
    if not starts:
        return None
    return CheckFinding(
        problem=f"{len(starts)} of {len(run.calls)} calls do not extend what was recorded, so each starts a new "
        "training sample",
        evidence=tuple(
            Evidence(source=f"call {call.index + 1}", observed=describe_branch(call, run.conversations))
            for call in starts[:MAX_SHOWN]
        ),
        change=CHANGE,
    )


def is_extension(call: SessionCall, run: Observation) -> bool:
    """Whether the prompt starts with the tokens of a recorded turn."""
    for turn in run.trajectory.turns:
        token_ids = turn.prompt_ids + turn.sampled_ids
        if call.prompt_ids[: len(token_ids)] == token_ids:
            return True
    return False


def describe_branch(call: SessionCall, conversations: tuple[ObservedConversation, ...]) -> str:
    """Why the call extends no recorded conversation: the first message that differs from the closest one."""
    earlier = [each for each in conversations if each.call_index < call.index]
    if not earlier:
        return "no earlier call has a recorded reply"
    closest = max(earlier, key=lambda each: (count_equal(each.keys, call.keys), each.call_index))
    num_equal, recorded = count_equal(closest.keys, call.keys), f"that of call {closest.call_index + 1}"
    if num_equal == len(closest.keys):
        if closest.scope != call.prompt.scope:
            return f"its tools or template variables differ from {recorded}"
        return f"its messages extend {recorded}, but the chat template renders the earlier ones differently"
    if num_equal == len(call.keys):
        if num_equal == len(closest.keys) - 1:
            return f"its prompt repeats {recorded}: a retry, or several samples of one prompt"
        return f"it goes back to the first {num_equal} messages of {recorded}"
    before, after = closest.keys[num_equal], call.keys[num_equal]
    shown = quote_difference(describe_key(before), describe_key(after))
    return f"message {num_equal + 1} ({after[0]}) differs from {recorded}: recorded {shown[0]}, sent {shown[1]}"


def describe_key(key: MatchKey) -> str:
    """A message as text: role, content and tool calls."""
    role, text, extra = key
    calls = " ".join(f"{name}({arguments})" for name, arguments in extra) if role == "assistant" else ""
    return f"{role}: {text} {calls}".rstrip()


NUM_BEFORE, NUM_AFTER = 30, 60


def quote_difference(one: str, other: str) -> tuple[str, str]:
    """Both texts from shortly before their first different character."""
    first = count_equal(one, other)
    start = max(first - NUM_BEFORE, 0)
    return _quote(one, start, first + NUM_AFTER), _quote(other, start, first + NUM_AFTER)


def _quote(text: str, start: int, end: int) -> str:
    return ("..." if start else "") + repr(text[start:end]) + ("..." if end < len(text) else "")
