"""Runs a workflow once and keeps what the checks read: the trajectory, its requests, and code that blocked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.chat.messages import MatchKey
from tunesmith.chat.renderer import Renderer
from tunesmith.config import RolloutSection
from tunesmith.rollout.openai_server.chat_completion import PendingChatCompletion
from tunesmith.rollout.openai_server.endpoint import ApiError, ChatEndpoint
from tunesmith.rollout.openai_server.text_completion import PendingTextCompletion
from tunesmith.rollout.recording.recorder import Recorder, Session, SessionCall
from tunesmith.rollout.runner import Agent, run_trajectory
from tunesmith.rollout.service import BoundModel, ModelProvider, ModelService
from tunesmith.rollout.watchdog import MIN_BLOCKED_S, BlockedTime, EventLoopWatchdog
from tunesmith.runs.policy import BuildModel, Policy
from tunesmith.types import Sampling, Task, Trajectory, Turn

LATE_CALLS_S = 0.5
"""Time after the rollout in which calls of its background tasks are still noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedConversation:
    """A call's messages and its reply, as the recorder matches later calls with them."""

    call_index: int
    scope: str
    keys: tuple[MatchKey, ...]


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
        super().__init__(asyncio.get_running_loop(), logger, MIN_BLOCKED_S / 2)
        self.steps: list[Blocked] = []

    def record_step(self, run: BlockedTime, seconds: float) -> None:
        step = BlockedTime()
        super().record_step(step, seconds)
        if step.blocked_s:
            run.blocked_s += seconds
            run.ended_at = step.ended_at
            if seconds > run.longest_s:
                run.longest_s, run.line = seconds, step.line
            self.steps.append(Blocked(seconds=seconds, line=step.line))


@contextlib.contextmanager
def watch_blocking() -> Iterator[BlockingLog]:
    watchdog = BlockingLog()
    threading.Thread(target=watchdog.watch, name="tunesmith-watchdog", daemon=True).start()
    try:
        yield watchdog
    finally:
        watchdog.is_stopped.set()


class ObservedModel:
    """The policy for one rollout; keeps the session's conversations when it is closed."""

    def __init__(self, service: ModelService) -> None:
        self._service = service
        self.conversations: tuple[ObservedConversation, ...] = ()

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        return self._service.open(seed=seed, order=order, sampling=sampling)

    def close(self, bound: BoundModel) -> tuple[Turn, ...]:
        assert isinstance(bound.session, Session)
        self.conversations = tuple(
            ObservedConversation(call_index=index, scope=scope, keys=keys)
            for index, scope, keys in bound.session.list_conversations()
        )
        return self._service.close(bound)


async def observe_rollout(
    task: Task,
    *,
    rollout: RolloutSection,
    seed: int,
    model_name: str,
    policy: Policy,
    agent: Agent,
    auxiliary_models: Mapping[str, ModelProvider],
    build_model: BuildModel,
) -> Observation:
    """Run the agent once with the seed, from an empty prefix cache.

    Without a dispatcher: the rollout has an endpoint and a watchdog of its own, which keep what a run does not.
    """
    policy.engine.resume(0)
    service = build_service(policy, build_model, model_name=model_name)
    endpoint, model = service.endpoint, ObservedModel(service)
    assert isinstance(endpoint, LoggedEndpoint)
    port, max_body_bytes = rollout.http_port, int(rollout.max_body_mib * 2**20)
    serving = contextlib.nullcontext() if port is None else service.serve(port=port, max_body_bytes=max_body_bytes)
    async with serving:
        with watch_blocking() as watchdog:
            trajectory = await run_trajectory(
                task, 0, agent=agent, model=model, auxiliary_models=auxiliary_models, seed=seed,
                watchdog=watchdog,
            )  # fmt: skip
        await asyncio.sleep(LATE_CALLS_S)
    policy.engine.pause()
    is_late = [error.status == 401 for error in endpoint.refused]
    return Observation(
        trajectory=trajectory,
        calls=tuple(sorted(endpoint.calls, key=lambda call: call.index)),
        conversations=model.conversations,
        refused=tuple(error for error, late in zip(endpoint.refused, is_late, strict=True) if not late),
        late=tuple(error for error, late in zip(endpoint.refused, is_late, strict=True) if late),
        blocked=tuple(watchdog.steps),
    )


def build_service(policy: Policy, build_model: BuildModel, *, model_name: str) -> ModelService:
    """The policy's endpoint with a log of its own."""
    renderer: Renderer = policy.service.recorder.renderer
    return ModelService(
        policy.engine,
        renderer,
        model_name=model_name,
        sampling=policy.sampling,
        build_model=lambda endpoint: build_model(endpoint, {}),
        build_endpoint=LoggedEndpoint,
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
