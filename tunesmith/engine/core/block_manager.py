"""Who holds which page of the key-value cache, and which full pages can be read again by others.

A page is free, held (by one or more requests), or cached: held by nobody but still known by the digest of its tokens
and all tokens before it. `allocate` takes free pages first and then drops the cached page that was left longest ago.
A page whose digest nobody asks for yet can be cached for a promise, and is found once that is kept. Digests start from
a salt (the policy version), so that pages of other weights never match. Holds no tensors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence


def compute_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Identify one full page by its tokens and the digest of the page before it (or the salt)."""
    return hashlib.blake2b(parent + array("i", token_ids).tobytes(), digest_size=16).digest()


def compute_salt(policy_version: int) -> bytes:
    """Where the digests of a policy version begin."""
    return hashlib.blake2b(str(policy_version).encode(), digest_size=16).digest()


class PagePool:
    """Reference counts of pages, and the prefix cache over them."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_holders = [0] * num_pages
        self._digest_of: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._promise_of: dict[int, object] = {}
        self._free = dict.fromkeys(range(num_pages - 1, -1, -1))  # the last one is taken first
        self._is_free = bytearray(b"\1") * num_pages
        self._cached: dict[int, None] = {}  # in the order they were left; a dict keeps it and removes in O(1)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Hold that many pages, or none at all (None) when there are too few."""
        if num_pages > self.num_available:
            return None
        pages = [self._free.popitem()[0] for _ in range(min(len(self._free), num_pages))]
        pages += [self._evict() for _ in range(num_pages - len(pages))]
        for page in pages:
            self._num_holders[page] = 1
            self._is_free[page] = 0
        return pages

    def allocate_run(self, num_pages: int, *, after: int | None, room: int) -> list[int] | None:
        """Like `allocate`, but pages that are neighbours where such are free: reading them needs no copy.

        They follow page `after` if they can. Else they leave free, if they can, `room` pages to grow into behind them
        and as many before them, for those that lie there.
        """
        if num_pages > self.num_available:
            return None
        while len(self._free) < num_pages:
            self._let_free(self._evict())
        first = self._find_free_run(num_pages, after, room)
        if first is None:
            return self.allocate(num_pages)
        pages = list(range(first, first + num_pages))
        for page in pages:
            del self._free[page]
            self._num_holders[page] = 1
        self._is_free[first : first + num_pages] = bytes(num_pages)
        return pages

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Pages of the longest known prefix; they are not held yet."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def count_cached(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody holds: holding them leaves that many fewer to allocate."""
        return sum(page in self._cached for page in pages)

    def select_unshared(self, pages: Iterable[int]) -> list[int]:
        """Those of the held pages that have one holder."""
        return [page for page in pages if self._num_holders[page] == 1]

    def hold(self, pages: Iterable[int]) -> None:
        """Hold pages that `find` returned, once more each."""
        for page in pages:
            if self._num_holders[page] == 0:
                del self._cached[page]
            self._num_holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages; the last of a prefix is dropped before the first."""
        for page in reversed(pages):
            num_left = self._num_holders[page] = self._num_holders[page] - 1
            assert num_left >= 0, f"page {page} was released more often than held"
            if num_left == 0:
                if self._digest_of[page] is None and page not in self._promise_of:
                    self._let_free(page)
                else:
                    self._cached[page] = None

    def publish(self, page: int, digest: bytes) -> None:
        """Let others find this full page; the first page of a digest stays the one that is found."""
        if digest not in self._page_of and self._digest_of[page] is None:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def promise(self, pages: Iterable[int], promise: object) -> None:
        """Keep full pages when they are left, for a digest that comes later."""
        for page in pages:
            if self._digest_of[page] is None:
                self._promise_of[page] = promise

    def keep_promise(self, page: int, digest: bytes, promise: object) -> None:
        """Publish a page that was promised, unless it has been dropped since; free it if it is one too many."""
        if self._promise_of.get(page) is not promise:
            return
        del self._promise_of[page]
        self.publish(page, digest)
        if self._digest_of[page] is None and page in self._cached:
            del self._cached[page]
            self._let_free(page)

    def forget(self, pages: Iterable[int]) -> None:
        """Let nobody find these pages again; their holders keep them."""
        for page in pages:
            self._promise_of.pop(page, None)
            digest = self._digest_of[page]
            if digest is not None:
                del self._page_of[digest]
                self._digest_of[page] = None

    def reset(self) -> None:
        """Forget every digest; nobody may hold a page."""
        assert not any(self._num_holders), "pages are held"
        self._digest_of = [None] * self.num_pages
        self._page_of.clear()
        self._promise_of.clear()
        self._cached.clear()
        self._free = dict.fromkeys(range(self.num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\1") * self.num_pages

    def _find_free_run(self, num_pages: int, after: int | None, room: int) -> int | None:
        """The first of so many free neighbours; None where there are none."""
        if after is not None and self._is_free.startswith(b"\1" * num_pages, after + 1):
            return after + 1
        while True:
            first = self._is_free.find(b"\1" * (num_pages + 2 * room))
            if first >= 0:
                return first + room if first else first
            if not room:
                return None
            room //= 2

    def _let_free(self, page: int) -> None:
        self._free[page] = None
        self._is_free[page] = 1

    def _evict(self) -> int:
        page = next(iter(self._cached))
        del self._cached[page]
        self.forget([page])
        return page
