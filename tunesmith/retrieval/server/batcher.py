"""Searches of concurrent requests in batches, in threads.

While one batch is searched the next one collects, so a batch grows with the load and a lone query never waits for
others. The event loop only hands over queries and results. Equal searches that wait or run at the same time are one.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tunesmith.retrieval.index.ranking import Ranking

Search = tuple[str, int]
"""A normalized query and its top_n. The index is fixed for the life of a server."""
ENTRY_BYTES = 400
"""Memory of an entry besides its query and its ranking."""
HIT_BYTES = 12


class RankingCache:
    """Least-recently-used cache of at most `max_bytes`; not for several threads."""

    def __init__(self, max_bytes: int) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._rankings: OrderedDict[Search, Ranking] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rankings)

    def get(self, search: Search) -> Ranking | None:
        """The ranking of a search, if it is known."""
        found = self._rankings.get(search)
        if found is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._rankings.move_to_end(search)
        return found

    def put(self, search: Search, ranking: Ranking) -> None:
        """Add a ranking; one that is larger than the whole cache is not kept."""
        size = _measure(search, ranking)
        if size > self._max_bytes or search in self._rankings:
            return
        self._rankings[search] = ranking
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _measure(*self._rankings.popitem(last=False))


def _measure(search: Search, ranking: Ranking) -> int:
    return ENTRY_BYTES + 4 * len(search[0]) + HIT_BYTES * len(ranking)


RankBatch = Callable[[Sequence[Search]], list[Ranking]]


class TooManySearchesError(Exception):
    """More queries wait than allowed; the client should try again later."""


class Batcher:
    """Ranks searches in batches. Used from one event loop."""

    def __init__(
        self, rank: RankBatch, cache: RankingCache, *, max_batch: int, max_waiting: int, num_threads: int
    ) -> None:
        self.cache = cache
        self.num_threads = num_threads
        self.num_running = 0
        self.num_batches = 0
        self.num_searches = 0
        self._rank = rank
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tunesmith-search")
        self._waiting: deque[Search] = deque()
        self._futures: dict[Search, asyncio.Future[Ranking]] = {}
        self._is_scheduled = False

    async def find(self, searches: Sequence[Search]) -> list[Ranking]:
        """Rankings of all searches of a request.

        Raises:
            TooManySearchesError: too many queries wait already; none of the request's is searched.
        """
        known = {search: self.cache.get(search) for search in dict.fromkeys(searches)}
        missing = [search for search, ranking in known.items() if ranking is None]
        added = [search for search in missing if search not in self._futures]
        if added and self._waiting and len(self._waiting) + len(added) > self._max_waiting:
            raise TooManySearchesError
        for search in added:
            self._futures[search] = asyncio.get_running_loop().create_future()
            self._waiting.append(search)
        futures = {search: self._futures[search] for search in missing}
        if futures:
            self._schedule()
            await asyncio.wait(futures.values())  # a request that is cancelled leaves the shared futures running
        found = known | {search: future.result() for search, future in futures.items()}
        return [ranking for search in searches if (ranking := found[search]) is not None]

    def close(self) -> None:
        """Wait for running batches; searches that wait are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _schedule(self) -> None:
        """Start batches when all requests that have arrived by now have added their searches."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_batches)

    def _start_batches(self) -> None:
        self._is_scheduled = False
        loop = asyncio.get_running_loop()
        while self._waiting and (num_free := self.num_threads - self.num_running) > 0:
            size = min(self._max_batch, -(-len(self._waiting) // num_free))
            batch = [self._waiting.popleft() for _ in range(size)]
            self.num_running += 1
            self.num_batches += 1
            self.num_searches += size
            running = loop.run_in_executor(self._threads, self._rank, batch)
            running.add_done_callback(functools.partial(self._deliver, batch))

    def _deliver(self, batch: list[Search], done: asyncio.Future[list[Ranking]]) -> None:
        self.num_running -= 1
        futures = [self._futures.pop(search) for search in batch]
        if done.cancelled():
            for future in futures:
                future.cancel()
        elif (error := done.exception()) is not None:
            for future in futures:
                future.set_exception(error)
        else:
            for search, future, ranking in zip(batch, futures, done.result(), strict=True):
                self.cache.put(search, ranking)
                future.set_result(ranking)
        if self._waiting:
            self._schedule()
