"""Live sessions: conversations of an agent in use, which are trained once their feedback has arrived.

A request with an unknown session id opens a session. Feedback ends it and makes it ready for training; a later request
with the same id opens a new one, in which the earlier turns are context. Sessions without feedback for
`feedback_timeout_s` after their last call are dropped and counted. `LiveSessions` is also the model provider and the
workflow of the run's rollouts: each rollout waits for a session with feedback and takes its turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunesmith.rollout.cancellation import cancel_all
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.recording.recorder import Session
from tunesmith.rollout.recording.replay import RolloutRecord
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.service import BoundModel, ModelService
from tunesmith.rollout.task_server.queue import remember
from tunesmith.rollout.time_limit import uncounted_time
from tunesmith.types import Sampling, Turn, WorkflowOutput

MAX_CHECK_S = 60.0
MAX_CALL_WAIT_S = 60.0
"""A client that does not read its stream delays training by this much at most."""
NUM_CHECKS = 8
"""Checks for sessions to drop in `feedback_timeout_s`."""


@dataclass(slots=True, kw_only=True, eq=False)
class LiveSession:
    """A conversation, and its feedback once it has arrived."""

    bound: BoundModel
    session: Session
    calls: set[asyncio.Future[None]]
    """The calls in flight of all conversations."""
    num_open_calls: int = 0
    last_call_at: float = field(default_factory=time.monotonic)
    feedback: WorkflowOutput | None = None

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A model call of the conversation."""
        self.num_open_calls += 1
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.add(ended)
        try:
            yield
        finally:
            self.calls.remove(ended)
            ended.cancel()
            self.num_open_calls -= 1
            self.last_call_at = time.monotonic()


class Slot:
    """The model and the session of a rollout: those of the live session that it takes."""

    record: RolloutRecord | None = None

    def __init__(self) -> None:
        self.live: LiveSession | None = None

    @property
    def num_calls(self) -> int:
        return 0 if self.live is None else self.live.session.num_calls

    @property
    def engine_error(self) -> str | None:
        return None if self.live is None else self.live.session.engine_error

    def end(self) -> None:
        """The session ended with its feedback."""

    def close(self) -> tuple[Turn, ...]:
        """The turns of the session; none if the rollout has taken none."""
        return () if self.live is None else self.live.bound.close()


class LiveSessions:
    """The conversations of a run that wait for feedback, and those that wait for training."""

    service: ModelService
    """In which sessions are opened; set before the first request."""

    def __init__(self, *, seed: int, feedback_timeout_s: float, max_sessions: int) -> None:
        """`max_sessions` bounds each of both; beyond it the oldest is dropped."""
        self._seed = seed
        self._feedback_timeout_s = feedback_timeout_s
        self._max_sessions = max_sessions
        self._num_opened = 0
        self._is_finished = False
        self._open: OrderedDict[str, LiveSession] = OrderedDict()
        """By session id, the one with the oldest call first."""
        self._scored: asyncio.Queue[LiveSession] = asyncio.Queue()
        self._calls: set[asyncio.Future[None]] = set()
        self._rewarded: OrderedDict[str, None] = OrderedDict()
        """Ids of sessions that ended with feedback."""

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_scored(self) -> int:
        return self._scored.qsize()

    def find_or_open(self, session_id: str) -> LiveSession:
        """The session of a model call."""
        if self._is_finished:
            raise ApiError(410, "the run has ended: it serves no model any more")
        live = self._open.get(session_id)
        if live is None:
            if len(self._open) >= self._max_sessions:
                self._drop(self._open.popitem(last=False)[1])
            self._num_opened += 1
            seed = derive_seed(self._seed, "live", self.service.policy_version, self._num_opened)
            bound = self.service.open(seed=seed, order=(self._num_opened,))
            assert isinstance(bound.session, Session)
            live = self._open[session_id] = LiveSession(bound=bound, session=bound.session, calls=self._calls)
        self._open.move_to_end(session_id)
        return live

    def check_open(self, session_id: str) -> None:
        """Raise ApiError if there is no session that waits for feedback."""
        live = self._open.get(session_id)
        if live is not None:
            if live.session.find_oldest_version() is None:  # a rollout without tokens would be a failure of the run
                raise ApiError(409, "the session has no completion to give feedback on")
            return
        if session_id in self._rewarded:
            raise ApiError(409, "the session has its feedback, and no model call since")
        raise ApiError(404, "no session of this id waits for feedback: it never existed, or was dropped")

    def add_feedback(self, session_id: str, feedback: WorkflowOutput) -> None:
        """End a session and let it wait for training; calls in flight are cancelled."""
        self.check_open(session_id)
        live = self._open.pop(session_id)
        live.feedback = feedback
        live.session.end()
        remember(self._rewarded, session_id, None)
        if self._scored.qsize() >= self._max_sessions:
            self._drop(self._scored.get_nowait())
        self._scored.put_nowait(live)

    def drop_expired(self) -> None:
        """Drop the sessions whose time for feedback has passed."""
        limit = time.monotonic() - self._feedback_timeout_s
        expired = [key for key, live in self._open.items() if not live.num_open_calls and live.last_call_at < limit]
        for session_id in expired:
            self._drop(self._open.pop(session_id))

    def finish(self) -> None:
        """The run has ended: calls in flight are cancelled, and later ones refused."""
        self._is_finished = True
        for live in self._open.values():
            live.session.end()

    def _drop(self, live: LiveSession) -> None:
        live.bound.close()
        self.service.recorder.count("num_dropped_sessions", 1)

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Drop expired sessions until the block ends."""

        async def check() -> None:
            while True:
                await asyncio.sleep(min(MAX_CHECK_S, self._feedback_timeout_s / NUM_CHECKS))
                self.drop_expired()

        checks = asyncio.create_task(check())
        try:
            yield
        finally:
            await cancel_all([checks])

    async def run_session(self, task: Mapping[str, Any], model: Any) -> WorkflowOutput:
        """The workflow: take the next session with feedback; waiting for it does not count toward the time limit.

        Calls that are in flight end first, so that a call waits for one update at most, also while feedback for many
        updates is there.
        """
        assert isinstance(model, Slot)
        with uncounted_time():
            if self._calls:
                await asyncio.wait(set(self._calls), timeout=MAX_CALL_WAIT_S)
            live = await self._scored.get()
        assert live.feedback is not None
        model.live = live
        return live.feedback

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        """A rollout without a session; its seed has no effect, since sessions have their own."""
        slot = Slot()
        return BoundModel(model=slot, session=slot, close=slot.close)
