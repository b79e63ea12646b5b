"""One queue for the workers of several ranks.

Every rank serves the model for its own attempts, and workers know the first rank only. The others offer it their
attempts over links, and it passes reports on. A task's `base_url` is that of its rank.

    rank 1 to rank 0   offer      the attempt waits in the queue of the first rank
    rank 0 to rank 1   take       a worker has it: its time limit begins
    rank 0 to rank 1   deliver    answered with the refusal, if any: its rank alone knows whether it has ended
    rank 1 to rank 0   end        it has its report, is out of time, or its worker is lost

The links are not those of the dispatcher: a rank carries out the messages of these one after the other, and an
evaluation, which is one message, only ends with the reports of its attempts. A rank waits for the answer to a report
and for nothing else, so none is held up while another one trains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from tunesmith.cluster.links import Link, Links
from tunesmith.errors import RankError
from tunesmith.rollout.cancellation import cancel_all
from tunesmith.rollout.failures import WorkerLostError
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.task_server.queue import Attempt, Report, TaskQueue


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
        self._link.call(OtherRank.offer, attempt.attempt_id, attempt.task, attempt.model_name, self._url)
        self._fail_if_lost(attempt)
        try:
            yield
        finally:
            del self._attempts[attempt.attempt_id]
            self._link.call(OtherRank.end, attempt.attempt_id)

    async def follow(self) -> None:
        """Carry out the messages of the first rank. Without it all attempts are lost."""
        try:
            while True:
                await self._link.carry_out(await self._link.receive(), self)
        except RankError as error:
            self._error = error
            for attempt in self._attempts.values():
                self._fail_if_lost(attempt)

    def take(self, attempt_id: str, worker: str) -> None:
        """A worker has taken the attempt."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:  # it may have ended meanwhile
            attempt.worker = worker
            attempt.taken.set()

    async def deliver(self, attempt_id: str, report: Report | None) -> tuple[int, str] | None:
        """Deliver a report, or a heartbeat; returns HTTP status and reason if it is refused."""
        try:
            self._queue.receive_report(attempt_id, report)
        except ApiError as error:
            return error.status, str(error)
        return None

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
                await self._link.carry_out(await self._link.receive(), self)
        except RankError:
            return  # reports say so
        finally:
            self._link.fail(RankError("the run has ended"))
            await cancel_all(self._offers.values())

    async def report(self, attempt_id: str, report: Report | None) -> None:
        """Pass a report on; raises ApiError if the rank refuses it."""
        try:
            refusal = await self._link.ask_for(FirstRank.deliver, attempt_id, report)
        except RankError as error:
            if self._queue.is_finished:  # the other ranks end before the first one, which tells workers of the end
                raise ApiError(410, "the attempt has ended: the run has ended") from error
            message = f"the rank of the attempt does not answer ({error}); try again later"
            raise ApiError(503, message) from error
        if refusal is not None:
            raise ApiError(*refusal)

    def offer(self, attempt_id: str, task: Mapping[str, Any], model_name: str, url: str) -> None:
        """Let workers take the attempt; `url`: base URL of the rank's server."""
        self._queue.note_rank(attempt_id, self.report)
        attempt = Attempt(attempt_id=attempt_id, task=task, model_name=model_name, rank=self._rank, url=url)
        self._offers[attempt_id] = asyncio.create_task(self._offer(attempt))

    def end(self, attempt_id: str) -> None:
        self._offers.pop(attempt_id).cancel()

    async def _offer(self, attempt: Attempt) -> None:
        """Offer an attempt until cancelled."""
        with self._queue.offered(attempt):
            await attempt.taken.wait()
            self._link.call(FirstRank.take, attempt.attempt_id, attempt.worker)
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def share_queue(queue: TaskQueue, links: Links, *, url: str) -> AsyncIterator[None]:
    """Let workers take the attempts of all ranks from the first one until the block ends; every rank calls this."""
    ranks = [FirstRank(queue, link, url) if rank == 0 else OtherRank(queue, link, rank) for rank, link in links.items()]
    for link in links.values():
        await link.open()
    following = [asyncio.create_task(each.follow()) for each in ranks]
    try:
        yield
    finally:
        await cancel_all(following)
        for link in links.values():
            await link.close()
