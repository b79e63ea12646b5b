"""One run of a workflow and its judge on a task -> a `Trajectory`.

The run ends in a reward or in a `Failure` that names the boundary that was crossed, never in both and never in an
exception. Workflow and judge share one deadline; user code that does not stop when it is cancelled is abandoned, and
its session closed, so that it cannot sample any more. A failure of the engine is never somebody's reward.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import Lease, ModelSource
from tunesmith.rollout.signature import list_parameters
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

Output = TypeVar("Output", WorkflowOutput, JudgeOutput)

MAX_MESSAGE_CHARS = 500
MAX_RESPONSE_CHARS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """What is run: the user's functions and how long they may take."""

    workflow: WorkflowType
    judge: JudgeType | None = None
    timeout_s: float
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("tunesmith.workflow"))
    """Handed to functions that ask for one; tracebacks of failures go here at debug level."""
    cancel_grace_s: float = 5.0
    """Seconds that cancelled functions may take to clean up before they are abandoned."""
    parameters: Mapping[FailureWhere, frozenset[str]] = field(init=False)
    """Names of what the workflow and the judge ask for."""

    def __post_init__(self) -> None:
        functions = {"workflow": self.workflow} | ({} if self.judge is None else {"judge": self.judge})
        object.__setattr__(self, "parameters", {where: list_parameters(each) for where, each in functions.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """How user code ended."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    response_text: str = ""
    failure: Failure | None = None


class _UserError(Exception):
    """User code crossed a boundary."""

    def __init__(self, where: FailureWhere, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(where=where, message=message)


async def run_trajectory(
    task: Task,
    run_index: int,
    *,
    agent: Agent,
    model: ModelSource,
    auxiliary_models: Mapping[str, ModelSource],
    seed: int,
    order: tuple[int, ...] = (),
    sampling: Sampling | None = None,
) -> Trajectory:
    """Run the agent once; `seed` fixes what its models sample, `order` is its place in the engine's queue."""
    started = time.perf_counter()
    lease = model.open(seed=seed, order=order, sampling=sampling)
    helpers = {
        name: source.open(seed=derive_seed(seed, name), order=order) for name, source in auxiliary_models.items()
    }
    turns: tuple[Turn, ...] = ()
    try:
        outcome = await _run_until_deadline(_run_user_code(task, agent, lease, helpers), agent)
    finally:
        turns = model.close(lease)
        for name, helper in helpers.items():
            auxiliary_models[name].close(helper)
    failure = _find_engine_failure(lease, helpers) or outcome.failure or _find_silence(lease, turns)
    return Trajectory(
        task=task,
        run_index=run_index,
        turns=turns,
        reward=None if failure else outcome.reward,
        metrics=outcome.metrics,
        failure=failure,
        response_text=outcome.response_text,
        duration_s=time.perf_counter() - started,
    )


async def _run_until_deadline(user_code: Awaitable[_Outcome], agent: Agent) -> _Outcome:
    running = asyncio.ensure_future(user_code)
    try:
        await asyncio.wait({running}, timeout=agent.timeout_s)
    except asyncio.CancelledError:
        await _stop(running, agent)
        raise
    if not running.done():
        await _stop(running, agent)
        return _Outcome(failure=Failure(where="timeout", message=f"not done after timeout_s={agent.timeout_s:g}"))
    if running.cancelled():
        message = "CancelledError: the workflow or the judge cancelled itself"
        return _Outcome(failure=Failure(where="workflow", message=message))
    return running.result()


async def _stop(running: asyncio.Future[_Outcome], agent: Agent) -> None:
    """Cancel user code; abandon it when it does not stop."""
    running.cancel()
    await asyncio.wait({running}, timeout=agent.cancel_grace_s)
    if not running.done():
        agent.logger.warning("user code went on for %g s after it was cancelled; abandoned", agent.cancel_grace_s)
        running.add_done_callback(lambda late: late.cancelled() or late.exception())


async def _run_user_code(task: Task, agent: Agent, lease: Lease, helpers: Mapping[str, Lease]) -> _Outcome:
    try:
        return await _run_workflow_and_judge(task, agent, lease, helpers)
    except _UserError as error:
        agent.logger.debug("%s run failed: %s", task.task_id, error, exc_info=error.__cause__)
        return _Outcome(failure=error.failure)


async def _run_workflow_and_judge(task: Task, agent: Agent, lease: Lease, helpers: Mapping[str, Lease]) -> _Outcome:
    offered: dict[str, Any] = {
        "model": lease.model,
        "auxiliary_models": {name: helper.model for name, helper in helpers.items()},
        "logger": agent.logger,
    }
    output = await _call("workflow", agent, agent.workflow, task, offered, WorkflowOutput)
    if lease.session is not None and lease.session.num_calls == 0:
        raise _UserError("workflow", "the workflow made no call to `model`, so there is nothing to train on")
    metrics = _check_metrics("workflow", output.metrics)
    text = describe_response(output.response)
    if agent.judge is None:
        message = "neither the workflow nor a judge gave a reward"
        return _Outcome(reward=_check_reward("workflow", output.reward, message), metrics=metrics, response_text=text)
    offered["response"] = output.response
    verdict = await _call("judge", agent, agent.judge, task, offered, JudgeOutput)
    reward = _check_reward("judge", verdict.reward, "the judge gave no verdict: its reward is None")
    metrics |= _check_metrics("judge", verdict.metrics)
    return _Outcome(reward=reward, metrics=metrics, response_text=text)


async def _call(
    where: FailureWhere,
    agent: Agent,
    func: Callable[..., Awaitable[Any]],
    task: Task,
    offered: Mapping[str, Any],
    kind: type[Output],
) -> Output:
    """Call user code by keyword with what its signature asks for, and a row of its own."""
    row = copy.deepcopy(dict(task.row))
    arguments = {name: offered[name] for name in agent.parameters[where] & offered.keys()}
    try:
        output = await func(task=row, **arguments)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise _UserError(where, describe_error(error, task)) from error
    if not isinstance(output, kind):
        raise _UserError(where, f"the {where} must return a {kind.__name__}, got {_describe_type(type(output))}")
    return output


def _find_engine_failure(lease: Lease, helpers: Mapping[str, Lease]) -> Failure | None:
    """An error of an engine fails the run even where user code swallowed it."""
    for name, held in {"model": lease, **helpers}.items():
        if held.session is not None and held.session.engine_error is not None:
            return Failure(where="engine", message=f"{name}: {_shorten(held.session.engine_error, MAX_MESSAGE_CHARS)}")
    return None


def _find_silence(lease: Lease, turns: Sequence[Turn]) -> Failure | None:
    """A run whose every call was refused has nothing to train on."""
    if lease.session is None or turns:
        return None
    message = f"none of the workflow's {lease.session.num_calls} calls to `model` was answered"
    return Failure(where="workflow", message=message)


def _check_reward(where: FailureWhere, reward: float | None, none_message: str) -> float:
    if reward is None:
        raise _UserError(where, none_message)
    if not math.isfinite(reward):
        raise _UserError(where, f"the {where} gave reward {reward}; it must be a finite number")
    if abs(reward) > MAX_REWARD:
        raise _UserError(where, f"the {where} gave reward {reward:g}; it must be within {MAX_REWARD:g} of 0")
    return float(reward)


def _check_metrics(where: FailureWhere, metrics: Mapping[str, float] | None) -> dict[str, float]:
    for name, value in (metrics or {}).items():
        if not math.isfinite(value):
            raise _UserError(where, f"the {where} gave metric {name}={value}; metrics must be finite numbers")
        if abs(value) > MAX_METRIC:
            raise _UserError(where, f"the {where} gave metric {name}={value:g}; it must be within {MAX_METRIC:g} of 0")
    return dict(metrics or {})


def describe_error(error: BaseException, task: Task) -> str:
    """Type and first line of an error; a missing field of the task is named with the fields there are."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    first_line = (str(error).splitlines() or [""])[0]
    message = (
        f"{type(error).__name__}: {_shorten(first_line, MAX_MESSAGE_CHARS)}" if first_line else type(error).__name__
    )
    if isinstance(error, KeyError) and error.args and error.args[0] not in task.row:
        message += f" (fields of the task: {', '.join(map(str, task.row))})"
    return message


def describe_response(response: Any) -> str:
    """The response as text, for people to read: text, an AgentScope message's text, or its repr."""
    if response is None or isinstance(response, str):
        return response or ""
    try:
        get_text = getattr(response, "get_text_content", None)
        text = get_text() if callable(get_text) else None
        return _shorten(text if isinstance(text, str) else repr(response), MAX_RESPONSE_CHARS)
    except Exception:  # noqa: BLE001 - the user's own object
        return f"<{_describe_type(type(response))}>"


def _describe_type(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
