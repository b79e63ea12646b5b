"""Runs a workflow and its judge on one task; returns a `Trajectory`.

A trajectory has either a reward or a `Failure` that names the boundary where the error occurred; an error of user code
never raises here. Workflow and judge share one deadline. User code that does not stop when it is cancelled is
abandoned, and its session is closed, so that it cannot sample any more. A rollout with an engine error has no reward.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tunesmith.errors import ServerLostError, shorten
from tunesmith.rollout.failures import (
    MAX_MESSAGE_CHARS,
    USE_MODEL,
    WorkerError,
    WorkerLostError,
    advise_on_client,
    advise_on_coroutine,
    describe_error,
    describe_type,
    format_traceback,
)
from tunesmith.rollout.recording.recorder import Session
from tunesmith.rollout.recording.replay import RolloutRecord
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import BoundModel, ModelProvider, RecordedCalls
from tunesmith.rollout.signature import is_sync_function, list_parameters
from tunesmith.rollout.time_limit import UncountedTime
from tunesmith.rollout.user_code import ThreadCall, UserCoroutine
from tunesmith.rollout.watchdog import BLOCKED_LIMIT_S, BlockedTime, EventLoopWatchdog
from tunesmith.storage import clean_text
from tunesmith.tool_log import CURRENT_LOG
from tunesmith.types import (
    MAX_METRIC,
    MAX_REWARD,
    Failure,
    FailureWhere,
    JudgeOutput,
    JudgeType,
    Sampling,
    Task,
    Trajectory,
    Turn,
    WorkflowOutput,
    WorkflowType,
)
from tunesmith.user_lines import find_definition_line, find_error_line

Output = TypeVar("Output", WorkflowOutput, JudgeOutput)

MAX_RESPONSE_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The user's functions and their time limits."""

    workflow: WorkflowType
    judge: JudgeType | None = None
    timeout_s: float
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("tunesmith.workflow"))
    """Passed to functions with a `logger` parameter; tracebacks of failures are logged here at debug level."""
    cancel_grace_s: float = 5.0
    """Seconds that cancelled functions may take to clean up before they are abandoned."""
    max_attempts: int = 1
    """Attempts of a rollout that lost its worker in another process, or the server of a tool or of its environment;
    each has new sessions and the whole time. Branches and what they replay have one."""
    parameters: Mapping[FailureWhere, frozenset[str]] = field(init=False)
    """Parameter names of the workflow and the judge."""

    def __post_init__(self) -> None:
        functions = {"workflow": self.workflow} | ({} if self.judge is None else {"judge": self.judge})
        object.__setattr__(self, "parameters", {where: list_parameters(each) for where, each in functions.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """Result of the workflow and the judge."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    response_text: str = ""
    failure: Failure | None = None
    is_lost: bool = False
    """Whether the rollout may be attempted again: its worker in another process, or a server, is lost."""


class _UserCodeError(Exception):
    """User code raised or returned an invalid result."""

    def __init__(self, where: FailureWhere, message: str, line: str | None, traceback: str | None = None) -> None:
        super().__init__(message)
        self.failure = Failure(where=where, message=message, line=line, traceback=traceback)


@dataclass(slots=True, kw_only=True)
class _Run:
    """State of one rollout."""

    task: Task
    agent: Agent
    bound: BoundModel
    auxiliary: Mapping[str, BoundModel]
    watchdog: EventLoopWatchdog
    blocked: BlockedTime = field(default_factory=BlockedTime)
    uncounted: UncountedTime = field(default_factory=UncountedTime)
    user_coroutine: UserCoroutine[Any] | None = None
    """The workflow or the judge, whichever is running."""


async def run_trajectory(
    task: Task,
    run_index: int,
    *,
    agent: Agent,
    model: ModelProvider,
    auxiliary_models: Mapping[str, ModelProvider],
    seed: int,
    order: tuple[int, ...] = (),
    sampling: Sampling | None = None,
    watchdog: EventLoopWatchdog | None = None,
    prepare: Callable[[RecordedCalls], None] | None = None,
    gate: asyncio.Event | None = None,
) -> Trajectory:
    """Run the agent; `seed` determines what its models sample, `order` its position in the engine's queue.

    It runs again, in new sessions, if its worker in another process is lost. `prepare` receives each session before its
    first call. With a `record`, the calls are recorded so that branches can replay them; if it has a branch point, the
    rollout is such a branch. The calls of all of its sessions, those of auxiliary models too, wait while `gate` is not
    set.

    The watchdog sums up the time that user code blocks the loop. All rollouts of a phase share one; by default the
    rollout creates its own.
    """
    watchdog = watchdog or EventLoopWatchdog(agent.logger, BLOCKED_LIMIT_S)
    for attempt in range(1, agent.max_attempts + 1):
        started = time.perf_counter()
        seed_of_attempt = seed if attempt == 1 else derive_seed(seed, "attempt", attempt)
        bound = model.open(seed=seed_of_attempt, order=order, sampling=sampling)
        if prepare is not None and bound.session is not None:
            prepare(bound.session)
        record = None if bound.session is None else bound.session.record
        auxiliary = {
            name: source.open(seed=derive_seed(seed_of_attempt, name), order=order)
            for name, source in auxiliary_models.items()
        }
        for each in (bound, *auxiliary.values()):
            if isinstance(each.session, Session):
                each.session.gate = gate
        run = _Run(task=task, agent=agent, bound=bound, auxiliary=auxiliary, watchdog=watchdog)
        try:
            outcome = await _run_until_deadline(run)
        finally:
            turns = bound.close()
            for each in auxiliary.values():
                each.close()
        if not outcome.is_lost or attempt == agent.max_attempts or record is not None:
            break
        agent.logger.warning(
            "%s: attempt %d of %d was lost; it is made again", task.task_id, attempt, agent.max_attempts
        )
    failure = _find_engine_failure(bound, auxiliary) or _find_replay_failure(record, outcome) or outcome.failure
    failure = failure or _find_missing_turns(bound, turns)
    point = None if record is None else record.point
    return Trajectory(
        task=task,
        run_index=run_index,
        turns=turns,
        reward=None if failure else outcome.reward,
        metrics=outcome.metrics,
        failure=failure,
        response_text=outcome.response_text,
        duration_s=time.perf_counter() - started,
        parent=None if point is None else point.parent,
        branch_at=None if point is None else point.branch_at,
        turn_owners=() if point is None else point.turn_owners[: len(turns)],
    )


async def _run_until_deadline(run: _Run) -> _Outcome:
    """Run user code until it returns or times out; neither time for which other rollouts blocked the loop nor
    uncounted time counts."""
    agent, watchdog = run.agent, run.watchdog
    started, blocked_at_start_s = time.monotonic(), watchdog.blocked_s
    running = asyncio.ensure_future(_run_user_code(run))

    def compute_remaining_s() -> float:
        blocked_by_others_s = watchdog.blocked_s - blocked_at_start_s - run.blocked.blocked_s
        return agent.timeout_s + blocked_by_others_s + run.uncounted.compute_s() - (time.monotonic() - started)

    try:
        while not running.done() and (remaining_s := compute_remaining_s()) > 0:
            await asyncio.wait({running}, timeout=remaining_s)
    except asyncio.CancelledError:
        await _cancel(running, agent)
        raise
    passed_since_block_s = time.monotonic() - watchdog.blocked_s - run.blocked.ended_at
    if (remaining_s := compute_remaining_s()) <= 0 and passed_since_block_s <= -remaining_s:  # passed while it blocked
        return await _fail_blocked_run(run, running)
    if not running.done():
        line = None if run.user_coroutine is None else run.user_coroutine.find_line()
        await _cancel(running, agent)
        message = f"not done after timeout_s={agent.timeout_s:g}"
        return _Outcome(failure=Failure(where="timeout", message=message, line=line))
    if running.cancelled():
        message = "CancelledError: the workflow or the judge cancelled itself"
        return _Outcome(failure=Failure(where="workflow", message=message, line=find_definition_line(agent.workflow)))
    return running.result()


async def _fail_blocked_run(run: _Run, running: asyncio.Future[_Outcome]) -> _Outcome:
    """A rollout that blocked the loop past its deadline has timed out, whatever it returned afterwards."""
    if not running.done():
        await _cancel(running, run.agent)
    elif not running.cancelled():
        running.exception()
    timeout_s, blocked = run.agent.timeout_s, run.blocked
    run.watchdog.record_overrun(blocked, timeout_s=timeout_s)
    message = f"blocked the event loop for {blocked.longest_s:.1f} s and was not done after timeout_s={timeout_s:g}"
    return _Outcome(failure=Failure(where="timeout", message=message, line=blocked.line))


async def _cancel(running: asyncio.Future[_Outcome], agent: Agent) -> None:
    """Cancel user code; abandon it if it does not stop within the grace period."""
    running.cancel()
    await asyncio.wait({running}, timeout=agent.cancel_grace_s)
    if not running.done():
        agent.logger.warning("user code did not stop within %g s of its cancellation; abandoned", agent.cancel_grace_s)
        running.add_done_callback(lambda late: late.cancelled() or late.exception())


async def _run_user_code(run: _Run) -> _Outcome:
    session = run.bound.session
    if session is not None and session.record is not None:
        CURRENT_LOG.set(session.record.tools)
    run.uncounted.bind()
    try:
        return await _run_workflow_and_judge(run)
    except _UserCodeError as error:
        run.agent.logger.debug("%s rollout failed: %s", run.task.task_id, error, exc_info=error.__cause__)
        return _Outcome(failure=error.failure, is_lost=isinstance(error.__cause__, WorkerLostError | ServerLostError))


async def _run_workflow_and_judge(run: _Run) -> _Outcome:
    agent, session = run.agent, run.bound.session
    available: dict[str, Any] = {
        "model": run.bound.model,
        "auxiliary_models": {name: bound_auxiliary.model for name, bound_auxiliary in run.auxiliary.items()},
        "logger": agent.logger,
    }
    output = await _call_user_function("workflow", run, agent.workflow, available, WorkflowOutput)
    if session is not None:
        session.end()
        if session.num_calls == 0:
            message = f"the workflow made no call to `model`, so there is nothing to train on: {USE_MODEL}"
            raise _UserCodeError("workflow", message, find_definition_line(agent.workflow))
    metrics = _check_metrics("workflow", agent.workflow, output.metrics)
    text = describe_response(output.response)
    if agent.judge is None:
        message = "neither the workflow nor a judge returned a reward"
        reward = _check_reward("workflow", agent.workflow, output.reward, message)
        return _Outcome(reward=reward, metrics=metrics, response_text=text)
    available["response"] = output.response
    verdict = await _call_user_function("judge", run, agent.judge, available, JudgeOutput)
    reward = _check_reward(
        "judge", agent.judge, verdict.reward, "the judge returned no reward: JudgeOutput.reward is None"
    )
    metrics |= _check_metrics("judge", agent.judge, verdict.metrics)
    return _Outcome(reward=reward, metrics=metrics, response_text=text)


async def _call_user_function(
    where: FailureWhere, run: _Run, func: Callable[..., Any], available: Mapping[str, Any], output_type: type[Output]
) -> Output:
    """Call user code with the keyword arguments in its signature and a private copy of the task's row.

    A plain function runs in a thread of its own.
    """
    row = copy.deepcopy(dict(run.task.row))
    arguments = {name: available[name] for name in run.agent.parameters[where] & available.keys()}
    try:
        arguments["task"] = row
        called = ThreadCall(func, arguments) if is_sync_function(func) else func(**arguments)
        run.user_coroutine = UserCoroutine(called, run.watchdog, run.blocked)
        output = await run.user_coroutine
    except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:  # user code may raise anything, including SystemExit and its own BaseExceptions
        is_outside = isinstance(error, WorkerError)
        line = None if is_outside else find_error_line(error) or find_definition_line(func)
        message = describe_error(error, run.task)
        message += advise_on_coroutine(message, is_sync=is_sync_function(func))
        message += advise_on_client(error) if where == "workflow" else ""
        raise _UserCodeError(where, message, line, format_traceback(error)) from error
    if not isinstance(output, output_type):
        name, field_name = output_type.__name__, "reward" if output_type is JudgeOutput else "response"
        message = f"the {where} must return a {name}, got {describe_type(type(output))}"
        advice = advise_on_coroutine(message, is_sync=is_sync_function(func))
        message += advice or f": write `return {name}({field_name}=...)`"
        if inspect.iscoroutine(output):
            output.close()
        raise _UserCodeError(where, message, find_definition_line(func))
    return output


def _find_engine_failure(bound: BoundModel, auxiliary: Mapping[str, BoundModel]) -> Failure | None:
    """An engine error fails the rollout even if user code caught it."""
    for name, bound_model in {"model": bound, **auxiliary}.items():
        error = None if bound_model.session is None else bound_model.session.engine_error
        if error is not None:
            return Failure(where="engine", message=f"{name}: {shorten(error, MAX_MESSAGE_CHARS)}")
    return None


def _find_replay_failure(record: RolloutRecord | None, outcome: _Outcome) -> Failure | None:
    """A branch that differs from its parent has failed, also if user code caught the error."""
    message = None if record is None else record.find_failure()
    if record is None or message is None or (record.error is None and outcome.failure is not None):
        return None
    return Failure(where="workflow", message=message)


def _find_missing_turns(bound: BoundModel, turns: Sequence[Turn]) -> Failure | None:
    """A rollout whose calls were all refused has no turns to train on."""
    if bound.session is None or turns:
        return None
    message = f"none of the workflow's {bound.session.num_calls} calls to `model` returned a completion"
    return Failure(where="workflow", message=message)


def _check_reward(where: FailureWhere, func: Callable[..., Any], reward: float | None, none_message: str) -> float:
    if reward is None:
        raise _UserCodeError(where, none_message, find_definition_line(func))
    _check_number(where, func, reward, f"reward {reward:g}", limit=MAX_REWARD)
    return float(reward)


def _check_metrics(
    where: FailureWhere, func: Callable[..., Any], metrics: Mapping[str, float] | None
) -> dict[str, float]:
    named = {clean_text(name): value for name, value in (metrics or {}).items()}  # trackers write names as UTF-8
    for name, value in named.items():
        _check_number(where, func, value, f"metric {name}={value:g}", limit=MAX_METRIC)
    return named


def _check_number(where: FailureWhere, func: Callable[..., Any], value: float, shown: str, *, limit: float) -> None:
    if not abs(value) <= limit:  # also NaN
        rule = f"it must be within {limit:g} of 0" if math.isfinite(value) else "it must be a finite number"
        raise _UserCodeError(where, f"the {where} returned {shown}; {rule}", find_definition_line(func))


def describe_response(response: Any) -> str:
    """The response as human-readable text: a str, the text of an AgentScope message, or the repr."""
    if response is None or isinstance(response, str):
        return response or ""
    try:
        get_text = getattr(response, "get_text_content", None)
        text = get_text() if callable(get_text) else None
        return shorten(text if isinstance(text, str) else repr(response), MAX_RESPONSE_CHARS)
    except Exception:  # noqa: BLE001 - the user's own object
        return f"<{describe_type(type(response))}>"
