"""The queue of a run's tasks: rollouts put attempts in, workers in other processes take them and report.

On several ranks workers take tasks from the first one, where the others offer theirs (`rank_queue.py`).
`TaskQueue.run_attempt` is the workflow of such a run. It is an ordinary workflow, so that groups, seeds, failures and
evaluations are those of every run. An attempt has the session of its rollout, whose key is its id. It ends with a
report (a response and a reward, or a failure), at its time limit, or with the loss of its worker: no model call and no
heartbeat for `lost_after_s`. The runner makes a lost attempt again, with a new session and thus a new id. What arrives
for an attempt that has ended is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tunesmith.rollout.failures import WorkerError, WorkerLostError
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.time_limit import uncounted_time
from tunesmith.types import WorkflowOutput

NUM_REMEMBERED = 65536
"""Ended attempts for which a late request learns why it is refused."""
NUM_TICKS = 8
"""Checks for signs of life in `lost_after_s`."""
REPORTED = "it has its report"

T = TypeVar("T")
Report = WorkflowOutput | WorkerError


@dataclass(slots=True, kw_only=True, eq=False)
class Attempt:
    """One attempt at a task by one worker."""

    attempt_id: str
    """The key of the session that records its model calls."""
    task: Mapping[str, Any]
    model_name: str
    report: asyncio.Future[Report] = field(default_factory=asyncio.Future)
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    worker: str = ""
    """The name that the worker gave itself."""
    num_open_calls: int = 0
    is_silent: bool = True
    """Whether the worker has sent nothing since the last check."""
    rank: int = 0
    """The rank whose engine samples for the attempt, and that receives its report."""
    url: str | None = None
    """Base URL of the server of another rank."""

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A model call of the worker; while it runs, the worker is alive."""
        self.num_open_calls += 1
        try:
            yield
        finally:
            self.num_open_calls -= 1
            self.is_silent = False


PassOn = Callable[[str, Report | None], Awaitable[None]]
"""Passes the report of an attempt on to its rank; None: a heartbeat."""


class TaskQueue:
    """Attempts that wait for a worker, attempts at work, and workers that wait for a task."""

    def __init__(self, *, timeout_s: float, lost_after_s: float, has_judge: bool) -> None:
        """`timeout_s`: the time limit of rollouts, which workers are told; `has_judge`: workers post no reward."""
        self.timeout_s = timeout_s
        self.has_judge = has_judge
        self._lost_after_s = lost_after_s
        self._waiting: list[Attempt] = []
        """In order of arrival."""
        self._has_news = asyncio.Event()
        """For workers that wait for a task: one has arrived, or the run has ended."""
        self._open: dict[str, Attempt] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._num_at_work: Counter[int] = Counter()
        """Attempts at work by rank."""
        self._num_away: Counter[str] = Counter()
        """By name, which workers may share: those whose attempt or request has ended and that have not asked since."""
        self._has_returned = asyncio.Event()
        self.is_finished = False
        self._elsewhere: OrderedDict[str, PassOn] = OrderedDict()
        """By attempt of another rank, ended ones too: their rank says why it refuses what comes late."""
        self.offer: Callable[[Attempt], contextlib.AbstractContextManager[None]] = self.offered
        """Offers an attempt of this rank to workers."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        return self._num_at_work.total()

    async def run_attempt(self, task: Mapping[str, Any], model: Any) -> WorkflowOutput:
        """The workflow: wait until a worker takes the task, which does not count toward the time limit, and reports."""
        row = json.loads(json.dumps(task, allow_nan=False, default=str))
        attempt = Attempt(attempt_id=model.api_key, task=row, model_name=model.model_name)
        reason = f"its time limit of {self.timeout_s:g} s has passed, or the run has ended"
        self._open[attempt.attempt_id] = attempt  # a worker may call before this rank knows that it took the attempt
        try:
            with self.offer(attempt):
                with uncounted_time():
                    await attempt.taken.wait()
                report = await self._wait_report(attempt)
            if isinstance(report, WorkerError):
                raise report
            return report
        except WorkerLostError:
            reason = f"its worker was lost: no model call and no heartbeat for {self._lost_after_s:g} s"
            self._count_return(attempt.worker)
            raise
        finally:
            self._open.pop(attempt.attempt_id, None)
            remember(self._ended, attempt.attempt_id, REPORTED if attempt.report.done() else reason)

    @contextlib.contextmanager
    def offered(self, attempt: Attempt) -> Iterator[None]:
        """Let workers take the attempt from this queue; it ends with the block."""
        self._waiting.append(attempt)
        self._has_news.set()
        try:
            yield
        finally:
            if attempt in self._waiting:
                self._waiting.remove(attempt)
            else:
                self._num_at_work[attempt.rank] -= 1
                self._num_away[attempt.worker] += 1

    async def _wait_report(self, attempt: Attempt) -> Report:
        """The worker's report; raises WorkerLostError once it has been silent for too long.

        Silence is counted in checks, not in seconds: while the event loop is blocked, nobody could be heard.
        """
        num_silent = 0
        while not attempt.report.done():
            attempt.is_silent = True
            await asyncio.wait({attempt.report}, timeout=self._lost_after_s / NUM_TICKS)
            num_silent = num_silent + 1 if attempt.is_silent and not attempt.num_open_calls else 0
            if num_silent >= NUM_TICKS and not attempt.report.done():
                raise WorkerLostError(
                    f"worker {attempt.worker!r} made no model call and sent no heartbeat for {self._lost_after_s:g} s"
                )
        return attempt.report.result()

    async def take(self, worker: str, wait_s: float) -> Attempt | None:
        """The next attempt, now the worker's; None if there is none for `wait_s` seconds.

        It is the oldest one of the rank that has the fewest at work.
        """
        self._count_return(worker)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self._waiting and not self.is_finished:
                    self._has_news.clear()
                    await self._has_news.wait()  # all who wait are woken, in the order in which they asked
        if self._waiting:
            # fewest at work first: all ranks wait for the slowest one before they train
            attempt = min(self._waiting, key=lambda each: self._num_at_work[each.rank])
            self._waiting.remove(attempt)
            attempt.worker = worker
            self._num_at_work[attempt.rank] += 1
            attempt.taken.set()
            return attempt
        if self.is_finished:
            raise ApiError(410, "the run has ended: there are no more tasks")
        self._num_away[worker] += 1
        return None

    def find_open(self, attempt_id: str, *, is_report: bool = False) -> Attempt:
        """An attempt at work; raises ApiError if it has ended or never existed. A second report is a conflict."""
        attempt = self._open.get(attempt_id)
        if attempt is not None and not attempt.report.done():
            attempt.taken.set()
            return attempt
        reason = REPORTED if attempt is not None else self._ended.get(attempt_id)
        if reason is None:
            raise ApiError(404, "there is no such attempt: use the attempt_id of a task that you took")
        raise ApiError(409 if is_report and reason == REPORTED else 410, f"the attempt has ended: {reason}")

    def note_rank(self, attempt_id: str, pass_on: PassOn) -> None:
        """The attempt is another rank's, which receives its reports."""
        remember(self._elsewhere, attempt_id, pass_on)

    def is_elsewhere(self, attempt_id: str) -> bool:
        """Whether the attempt is another rank's."""
        return attempt_id in self._elsewhere

    async def report(self, attempt_id: str, report: Report | None) -> None:
        """Deliver the report of an open attempt to its rank, or a heartbeat."""
        if (pass_on := self._elsewhere.get(attempt_id)) is not None:
            await pass_on(attempt_id, report)
        else:
            self.receive_report(attempt_id, report)

    def receive_report(self, attempt_id: str, report: Report | None) -> None:
        """Deliver the report of an open attempt of this rank, or a heartbeat."""
        attempt = self.find_open(attempt_id, is_report=True)
        if report is None:
            attempt.is_silent = False
        else:
            attempt.report.set_result(report)

    def finish(self) -> None:
        """The run has ended: waiting workers learn it."""
        self.is_finished = True
        self._has_news.set()

    async def wait_for_workers(self, timeout_s: float) -> None:
        """After `finish`: wait until those that are away have asked for a task again, and know of the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_away:
                    self._has_returned.clear()
                    await self._has_returned.wait()

    def _count_return(self, worker: str) -> None:
        """A worker of this name asks for a task, or is lost."""
        if self._num_away[worker] > 1:
            self._num_away[worker] -= 1
        else:
            del self._num_away[worker]
        self._has_returned.set()


def remember(known: OrderedDict[str, T], key: str, value: T) -> None:
    """Add an entry, and forget the oldest one of too many."""
    known[key] = value
    if len(known) > NUM_REMEMBERED:
        known.popitem(last=False)
