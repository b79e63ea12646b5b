"""`end_together`: ranks wait for each other's work, while the event loop of each goes on."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from conditions import until
from tunesmith.cluster import wait
from tunesmith.cluster.ranks import Ranks
from tunesmith.errors import RankError

pytestmark = pytest.mark.anyio


@dataclass
class Exchange:
    """What two ranks in threads of one process gather; `abort` is the death of one."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))
    values: dict[int, Any] = field(default_factory=dict)


class RanksOfThreads(Ranks):
    """Two ranks that meet in `EXCHANGE`."""

    def all_gather_objects(self, value: Any) -> list[Any]:
        try:
            EXCHANGE.values[self.rank] = value
            EXCHANGE.barrier.wait(timeout=30)
            gathered = [EXCHANGE.values[0], EXCHANGE.values[1]]
            EXCHANGE.barrier.wait(timeout=30)
            return gathered
        except threading.BrokenBarrierError:
            raise RankError("another rank has ended") from None


EXCHANGE = Exchange()
RANKS = [RanksOfThreads(rank=rank, world_size=2) for rank in range(2)]


@pytest.fixture(autouse=True)
def exchange(monkeypatch):
    global EXCHANGE
    EXCHANGE = Exchange()
    monkeypatch.setattr(wait, "INTERVAL_S", 0.05)
    yield
    EXCHANGE.barrier.abort()


async def test_the_rank_that_is_done_waits_and_its_event_loop_goes_on():
    release, num_turns = asyncio.Event(), 0

    async def count_turns():
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.01)
            num_turns += 1

    counting = asyncio.create_task(count_turns())
    first = asyncio.create_task(wait.end_together(RANKS[0], asyncio.sleep(0, "first")))
    other = asyncio.create_task(wait.end_together(RANKS[1], release.wait()))
    await until(lambda: num_turns > 20)  # while ranks exchange several times
    assert not first.done()
    release.set()
    assert await asyncio.gather(first, other) == ["first", True]
    counting.cancel()


async def test_the_work_is_cancelled_when_another_rank_ends():
    forever = asyncio.Event()
    running = [asyncio.create_task(wait.end_together(each, forever.wait())) for each in RANKS]
    await asyncio.sleep(0.1)
    EXCHANGE.barrier.abort()
    for each in running:
        with pytest.raises(RankError, match="another rank has ended"):
            await each


async def test_an_error_of_the_work_is_raised_at_once():
    async def fail():
        raise ValueError("no reward")

    forever = asyncio.Event()
    other = asyncio.create_task(wait.end_together(RANKS[1], forever.wait()))
    with pytest.raises(ValueError, match="no reward"):
        await wait.end_together(RANKS[0], fail())
    other.cancel()


async def test_one_rank_waits_for_nobody():
    assert await wait.end_together(Ranks(), asyncio.sleep(0, 5)) == 5
