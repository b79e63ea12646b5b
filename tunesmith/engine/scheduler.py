"""Which tokens the next forward computes: policy only, no tensors.

Each step every running request gets its next tokens (one when it decodes, a chunk while its prompt is prefilled), then
waiting requests are admitted by ascending priority while tokens, rows and pages last. When pages run out the running
request of lowest priority is preempted: it lets go of its pages and later computes prompt and sampled tokens again.
The decisions depend on the requests and their order alone, never on time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from tunesmith.engine.pages import PagePool, compute_digest, compute_salt
from tunesmith.engine.request import Request


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


class Scheduler:
    """Waiting and running requests, and the pages they hold."""

    def __init__(
        self, pool: PagePool, *, page_size: int, max_num_seqs: int, max_batched_tokens: int, has_prefix_cache: bool
    ) -> None:
        self.pool = pool
        self.page_size = page_size
        self.max_batched_tokens = max_batched_tokens
        self.has_prefix_cache = has_prefix_cache
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
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

    def schedule(self, *, may_preempt: bool = True) -> Schedule:
        """Choose the next step's work; requests that can never fit are removed and returned as stuck.

        Requests in a block that is not read yet are left out. Where nobody may be preempted, others wait for pages.
        """
        step = Schedule(num_tokens_left=self.max_batched_tokens, may_preempt=may_preempt)
        self._continue_running(step)
        if self.waiting and not step.num_preemptions:
            self._admit_waiting(step)
        return step

    def reserve(self, requests: Sequence[Request], num_tokens: int) -> bool:
        """Hold pages for `num_tokens` more tokens of every request beyond the known ones, or for none of them.

        The last known token counts as one of them, for it is not computed yet. No request is given pages past where it
        must end.
        """
        short, total = [], 0
        for request in requests:
            last = min(request.num_known - 1 + num_tokens, request.limit)
            num_missing = -(-last // self.page_size) - len(request.pages)
            if num_missing > 0:
                short.append((request, num_missing))
                total += num_missing
        if total > self.pool.num_available:
            return False
        for request, num_missing in short:
            pages = self.pool.allocate(num_missing)
            assert pages is not None
            request.pages += pages
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
        self.pool.reset()
        self._salt = compute_salt(policy_version)

    def _continue_running(self, step: Schedule) -> None:
        """Give running requests their next tokens by priority."""
        index = 0
        while index < len(self.running) and step.num_tokens_left:
            request = self.running[index]
            if request.num_launches:
                index += 1
                continue
            stop = min(len(request.token_ids), request.num_computed + step.num_tokens_left)
            if not self._grow(request, stop, step):
                break
            step.work.append(Work(request, request.num_computed, stop))
            step.num_tokens_left -= stop - request.num_computed
            index += 1

    def _grow(self, request: Request, num_tokens: int, step: Schedule) -> bool:
        """Hold pages for `num_tokens`, preempting from the lowest priority up; False if the request itself went."""
        num_missing = -(-num_tokens // self.page_size) - len(request.pages)
        if num_missing <= 0:
            return True
        while (pages := self.pool.allocate(num_missing)) is None:
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
        being_computed = self._collect_being_computed()
        admitted: set[int] = set()
        for request in self.waiting:
            if not step.num_tokens_left or not self._free_rows:
                break
            num_pages = -(-len(request.token_ids) // self.page_size)
            if num_pages > self.pool.num_pages:
                step.stuck.append(request)
                continue
            digests = self._compute_digests(request)[: (len(request.token_ids) - 1) // self.page_size]
            found = self.pool.find(digests)
            if len(found) < len(digests) and digests[len(found)] in being_computed:
                continue  # in a step or two it will find this page; computing it twice would be waste
            if not self._start(request, found, num_pages - len(found)):
                break
            admitted.add(request.request_id)
            stop = min(len(request.token_ids), request.num_computed + step.num_tokens_left)
            step.work.append(Work(request, request.num_computed, stop))
            step.num_tokens_left -= stop - request.num_computed
            being_computed.update(request.digests[len(found) :])
        gone = admitted.union(request.request_id for request in step.stuck)
        self.waiting = [request for request in self.waiting if request.request_id not in gone]

    def _start(self, request: Request, found: list[int], num_missing: int) -> bool:
        """Hold all pages of the known tokens, leaving each running request one to grow into."""
        num_left = self.pool.num_available - self.pool.count_cached(found) - num_missing
        if num_left < len(self.running):
            return False
        self.pool.hold(found)
        pages = self.pool.allocate(num_missing)
        assert pages is not None
        request.pages = found + pages
        request.num_computed = len(found) * self.page_size
        request.num_published = len(found)
        request.row = self._free_rows.pop()
        request.num_starts += 1
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed
        insort(self.running, request, key=_get_priority)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._let_go(request)
        self.add(request)

    def _let_go(self, request: Request) -> None:
        assert request.row is not None
        if self.has_prefix_cache:
            self._publish(request)
        self.pool.release(request.pages)
        self._free_rows.append(request.row)
        request.pages = []
        request.row = None
        request.num_computed = request.num_published = 0

    def _collect_being_computed(self) -> set[bytes]:
        """Digests of full pages that running requests are still prefilling."""
        digests: set[bytes] = set()
        if self.has_prefix_cache:
            for request in self.running:
                if len(request.token_ids) - request.num_computed > 1:
                    digests.update(self._compute_digests(request)[request.num_published :])
        return digests

    def _compute_digests(self, request: Request) -> list[bytes]:
        """Digests of all full pages of the request's tokens; none without a prefix cache."""
        if not self.has_prefix_cache:
            return []
        digests, size = request.digests, self.page_size
        for page in range(len(digests), len(request.token_ids) // size):
            parent = digests[-1] if digests else self._salt
            digests.append(compute_digest(parent, request.token_ids[page * size : (page + 1) * size]))
        return digests

    def _publish(self, request: Request) -> None:
        digests = self._compute_digests(request)
        num_full = request.num_computed // self.page_size
        for page in range(request.num_published, num_full):
            self.pool.publish(request.pages[page], digests[page])
        request.num_published = num_full


def _get_priority(request: Request) -> tuple[tuple[int, ...], int]:
    return request.priority
