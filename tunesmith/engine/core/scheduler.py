"""Which tokens the next forward computes: policy only, no tensors.

Each step every running request gets its next tokens (one when it decodes, a chunk while its prompt is prefilled), then
waiting requests are admitted by ascending priority while tokens, rows and pages last. When pages run out the running
request of lowest priority is preempted: it lets go of its pages and later computes prompt and sampled tokens again.
The decisions depend on the requests and their order alone, never on time.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from tunesmith.engine.core.block_manager import PagePool, compute_digest, compute_salt
from tunesmith.engine.core.request import Request

LEAST_ROOM = 16
"""Pages that a short request may grow by before its keys and values continue elsewhere in the cache."""

_get_priority = attrgetter("priority")


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens `[start, stop)` of a request, to be computed in this step."""

    request: Request
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """The last known token is among them, so the next one is sampled."""
        return self.stop == len(self.request.token_ids)


@dataclass(slots=True)
class Schedule:
    """One step."""

    work: list[Work] = field(default_factory=list)
    stuck: list[Request] = field(default_factory=list)
    """Requests that left because not even the whole cache could hold them."""
    num_tokens_left: int = 0
    num_preemptions: int = 0
    may_preempt: bool = True
    comes_first: Callable[[Work], bool] | None = None
    """Whether work is in the step's first forward, so that others of the step may read what it writes; None: all is."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tail:
    """Full pages that a request left behind, whose digests are computed when somebody may look for them."""

    token_ids: list[int]
    digests: list[bytes]
    first: int
    pages: list[int]


class Scheduler:
    """Waiting and running requests, and the pages they hold."""

    def __init__(
        self,
        pool: PagePool,
        *,
        page_size: int,
        max_num_seqs: int,
        max_batched_tokens: int,
        has_prefix_cache: bool,
        keeps_runs: bool = False,
    ) -> None:
        """With `keeps_runs` a request's pages are neighbours in the cache where they can be."""
        self.pool = pool
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.has_prefix_cache = has_prefix_cache
        self.keeps_runs = keeps_runs
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._tails: list[_Tail] = []
        self._salt = compute_salt(0)

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_get_priority)

    def remove(self, request: Request) -> None:
        """Forget a request that ended, wherever it is."""
        if request.row is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._let_go(request)

    def schedule(self, *, may_preempt: bool = True, comes_first: Callable[[Work], bool] | None = None) -> Schedule:
        """Choose the next step's work; requests that can never fit are removed and returned as stuck.

        Requests in a block that is not read yet are left out. Where nobody may be preempted, others wait for pages.
        """
        step = Schedule(num_tokens_left=self.max_batched_tokens, may_preempt=may_preempt, comes_first=comes_first)
        self._continue_running(step)
        if self.waiting and not step.num_preemptions:
            self._admit_waiting(step)
        return step

    def reserve(self, requests: Sequence[Request], num_tokens_R: NDArray[np.int64]) -> bool:
        """Hold pages for that many tokens of each request; False, and none at all, when there are too few."""
        num_held_R = np.array([len(request.pages) for request in requests], dtype=np.int64)
        num_missing_R = -(-num_tokens_R // self.page_size) - num_held_R
        short = np.flatnonzero(num_missing_R > 0)
        lasts = num_missing_R[short].cumsum().tolist()
        pages = self.pool.allocate(lasts[-1] if lasts else 0)
        if pages is None:
            return False
        first = 0
        for row, last in zip(short.tolist(), lasts, strict=True):
            requests[row].pages += pages[first:last]
            first = last
        return True

    def commit(self, work: Sequence[Work]) -> None:
        """Note that the work's keys and values are in the pages now, or will be before anything reads them."""
        for item in work:
            request = item.request
            request.num_computed = item.stop
            if self.has_prefix_cache and item.stop // self.page_size > request.num_published:
                self._publish(request)

    def restart(self, policy_version: int) -> None:
        """Forget every key and value: what runs waits again, and only pages of this version will be found."""
        for request in list(self.running):
            self._preempt(request)
        for request in self.waiting:
            request.digests.clear()
        self._tails.clear()
        self.pool.reset()
        self._salt = compute_salt(policy_version)

    def _continue_running(self, step: Schedule) -> None:
        """Give running requests their next tokens by priority."""
        for request in [request for request in self.running if not request.is_launched]:
            if not step.num_tokens_left or request.row is None:
                break  # all behind one that was preempted went before it
            stop = min(len(request.token_ids), request.num_computed + step.num_tokens_left)
            if not self._grow(request, stop, step):
                break
            step.work.append(Work(request, request.num_computed, stop))
            step.num_tokens_left -= stop - request.num_computed

    def _grow(self, request: Request, num_tokens: int, step: Schedule) -> bool:
        """Hold pages for `num_tokens`, preempting from the lowest priority up; False if the request itself went."""
        num_missing = -(-num_tokens // self.page_size) - len(request.pages)
        if num_missing <= 0:
            return True
        while (pages := self._allocate(request, request.pages, num_missing)) is None:
            if not step.may_preempt:
                return False
            victim = self.running[-1]
            if victim is request and len(self.running) == 1:
                self.remove(request)
                step.stuck.append(request)
                return False
            self._preempt(victim)
            step.num_preemptions += 1
            if victim is request:
                return False
        request.pages += pages
        return True

    def _admit_waiting(self, step: Schedule) -> None:
        """Start waiting requests by priority until tokens, rows or pages end; none overtakes for want of pages."""
        self._publish_tails()
        ready = {digest: page for item in step.work for digest, page in self._list_new_pages(item, step)}
        admitted: set[int] = set()
        for request in self.waiting:
            if not step.num_tokens_left or not self._free_rows:
                break
            num_pages = -(-len(request.token_ids) // self.page_size)
            if num_pages > self.pool.num_pages:
                step.stuck.append(request)
                continue
            self._compute_digests(request.token_ids, request.digests)
            digests = request.digests[: (len(request.token_ids) - 1) // self.page_size]
            found = self.pool.find(digests)
            found += map(ready.__getitem__, takewhile(ready.__contains__, digests[len(found) :]))
            if not self._start(request, found, num_pages - len(found)):
                break
            admitted.add(request.request_id)
            stop = min(len(request.token_ids), request.num_computed + step.num_tokens_left)
            step.work.append(Work(request, request.num_computed, stop))
            step.num_tokens_left -= stop - request.num_computed
            ready.update(self._list_new_pages(step.work[-1], step))
        gone = admitted.union(request.request_id for request in step.stuck)
        self.waiting = [request for request in self.waiting if request.request_id not in gone]

    def _start(self, request: Request, found: list[int], num_missing: int) -> bool:
        """Hold all pages of the known tokens, leaving each running request one to grow into."""
        num_left = self.pool.num_available - self.pool.count_cached(found) - num_missing
        if num_left < len(self.running):
            return False
        self.pool.hold(found)
        pages = self._allocate(request, found, num_missing)
        assert pages is not None
        request.pages = found + pages
        request.num_computed = len(found) * self.page_size
        request.num_published = len(found)
        request.row = self._free_rows.pop()
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
        insort(self.running, request, key=_get_priority)
        return True

    def _allocate(self, request: Request, before: Sequence[int], num_pages: int) -> list[int] | None:
        """Pages for a request that follow those `before`; a new run has room to double within the request's limit."""
        if not self.keeps_runs:
            return self.pool.allocate(num_pages)
        num_held = len(before) + num_pages
        room = min(max(num_held, LEAST_ROOM), -(-request.limit // self.page_size) - num_held)
        return self.pool.allocate_run(num_pages, after=before[-1] if before else None, room=max(room, 0))

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._let_go(request)
        self.add(request)

    def _let_go(self, request: Request) -> None:
        assert request.row is not None
        pages = request.pages[request.num_published : request.num_computed // self.page_size]
        if pages and self.has_prefix_cache:
            self._tails.append(_Tail(request.token_ids, request.digests, request.num_published, pages))
            self.pool.promise(pages, self._tails[-1])
        self.pool.release(request.pages)
        self._free_rows.append(request.row)
        request.pages = []
        request.runs = []
        request.row = None
        request.num_computed = request.num_published = 0

    def _list_new_pages(self, item: Work, step: Schedule) -> Iterator[tuple[bytes, int]]:
        """Full pages that the work fills before others read them: a layer writes keys and values, then all attend."""
        if step.comes_first is not None and not step.comes_first(item):
            return iter(())
        request = item.request
        pages = slice(request.num_published, item.stop // self.page_size)
        return zip(request.digests[pages], request.pages[pages], strict=False)

    def _compute_digests(self, token_ids: list[int], digests: list[bytes]) -> None:
        """Add the digests of full pages that have none yet; without a prefix cache nobody needs any."""
        size = self.page_size
        first, last = len(digests) * size, len(token_ids) // size * size
        if first == last or not self.has_prefix_cache:
            return
        parent = digests[-1] if digests else self._salt
        new_ids = array("i", token_ids[first:last])
        for start in range(0, last - first, size):
            parent = compute_digest(parent, new_ids[start : start + size])
            digests.append(parent)

    def _publish(self, request: Request) -> None:
        self._compute_digests(request.token_ids, request.digests)
        num_full = request.num_computed // self.page_size
        for page in range(request.num_published, num_full):
            self.pool.publish(request.pages[page], request.digests[page])
        request.num_published = num_full

    def _publish_tails(self) -> None:
        for tail in self._tails:
            self._compute_digests(tail.token_ids, tail.digests)
            for page, digest in zip(tail.pages, tail.digests[tail.first :], strict=False):
                self.pool.keep_promise(page, digest, tail)
        self._tails.clear()
