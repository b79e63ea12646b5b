"""One queue for the workers of several ranks.

Every rank serves the model for its own attempts, and workers know the first rank only. The others offer it their
attempts over links, and it passes reports on. A task's `base_url` is that of its rank.

    rank 1 to rank 0   OfferAttempt    the attempt waits in the queue of the first rank
    rank 0 to rank 1   AttemptTaken    a worker has it: its time limit begins
    rank 0 to rank 1   PassReport      answered with the refusal, if any: its rank alone knows whether it has ended
    rank 1 to rank 0   EndAttempt      it has its report, is out of time, or its worker is lost

The links are not those of the dispatcher: a rank carries out the messages of these one after the other, and an
evaluation, which is one message, only ends with the reports of its attempts. A rank waits for the answer to a report
and for nothing else, so none is held up while another one trains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.cluster.links import Link, Links
from tunesmith.errors import RankError
from tunesmith.rollout.cancellation import cancel_all
from tunesmith.rollout.failures import WorkerLostError
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.task_server.queue import Attempt, Report, TaskQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferAttempt:
    attempt_id: str
    task: Mapping[str, Any]
    model_name: str
    url: str
    """Base URL of the rank's server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    attempt_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTaken:
    attempt_id: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """Answered with the HTTP status and the reason if it is refused, else with None."""

    attempt_id: str
    report: Report | None
    """None: a heartbeat."""


class FirstRank:
    """The first rank, from the side of another one."""

    def __init__(self, queue: TaskQueue, link: Link, url: str) -> None:
        """`url`: base URL of this rank's server."""
        queue.offer = self.offered
        self._queue = queue
        self._link = link
        self._url = url
        self._attempts: dict[str, Attempt] = {}
        self._error: RankError | None = None

    @contextlib.contextmanager
    def offered(self, attempt: Attempt) -> Iterator[None]:
        """Let workers take the attempt from the first rank until the block ends."""
        self._attempts[attempt.attempt_id] = attempt
        self._link.send(
            OfferAttempt(attempt_id=attempt.attempt_id, task=attempt.task, model_name=attempt.model_name, url=self._url)
        )
        self._fail_if_lost(attempt)
        try:
            yield
        finally:
            del self._attempts[attempt.attempt_id]
            self._link.send(EndAttempt(attempt_id=attempt.attempt_id))

    async def follow(self) -> None:
        """Carry out the messages of the first rank. Without it all attempts are lost."""
        try:
            while True:
                self._receive(await self._link.receive())
        except RankError as error:
            self._error = error
            for attempt in self._attempts.values():
                self._fail_if_lost(attempt)

    def _receive(self, message: AttemptTaken | PassReport) -> None:
        match message:
            case AttemptTaken():
                attempt = self._attempts.get(message.attempt_id)
                if attempt is not None:  # it may have ended meanwhile
                    attempt.worker = message.worker
                    attempt.taken.set()
            case PassReport():
                refusal = None
                try:
                    self._queue.receive_report(message.attempt_id, message.report)
                except ApiError as error:
                    refusal = (error.status, str(error))
                self._link.answer(refusal)

    def _fail_if_lost(self, attempt: Attempt) -> None:
        if self._error is None:
            return
        if not attempt.report.done():
            attempt.report.set_exception(WorkerLostError(f"the first rank no longer offers the task ({self._error})"))
        attempt.taken.set()


class OtherRank:
    """Another rank, on the first one."""

    def __init__(self, queue: TaskQueue, link: Link, rank: int) -> None:
        self._queue = queue
        self._link = link
        self._rank = rank
        self._offers: dict[str, asyncio.Task[None]] = {}
        """By attempt."""

    async def follow(self) -> None:
        """Carry out the rank's messages. Its attempts end with it."""
        try:
            while True:
                self._receive(await self._link.receive())
        except RankError:
            return  # reports say so
        finally:
            self._link.fail(RankError("the run has ended"))
            await cancel_all(self._offers.values())

    async def report(self, attempt_id: str, report: Report | None) -> None:
        """Pass a report on; raises ApiError if the rank refuses it."""
        try:
            refusal = await self._link.ask(PassReport(attempt_id=attempt_id, report=report))
        except RankError as error:
            message = f"the rank of the attempt does not answer ({error}); try again later"
            raise ApiError(503, message) from error
        if refusal is not None:
            raise ApiError(*refusal)

    def _receive(self, message: OfferAttempt | EndAttempt) -> None:
        match message:
            case OfferAttempt():
                self._queue.note_rank(message.attempt_id, self.report)
                self._offers[message.attempt_id] = asyncio.create_task(self._offer(message))
            case EndAttempt():
                self._offers.pop(message.attempt_id).cancel()

    async def _offer(self, offer: OfferAttempt) -> None:
        """Offer an attempt until cancelled."""
        attempt = Attempt(
            attempt_id=offer.attempt_id,
            task=offer.task,
            model_name=offer.model_name,
            rank=self._rank,
            url=offer.url,
        )
        with self._queue.offered(attempt):
            await attempt.taken.wait()
            self._link.send(AttemptTaken(attempt_id=attempt.attempt_id, worker=attempt.worker))
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def share_queue(queue: TaskQueue, links: Links, *, url: str) -> AsyncIterator[None]:
    """Let workers take the attempts of all ranks from the first one until the block ends; every rank calls this."""
    ranks = [
        FirstRank(queue, link, url) if rank == 0 else OtherRank(queue, link, rank)
        for rank, link in links.by_rank.items()
    ]
    for link in links.by_rank.values():
        await link.open()
    following = [asyncio.create_task(each.follow()) for each in ranks]
    try:
        yield
    finally:
        await cancel_all(following)
        for link in links.by_rank.values():
            await link.close()
