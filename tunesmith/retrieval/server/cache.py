"""Rankings of earlier queries, limited by the memory that they take; the least recently used are dropped."""

from __future__ import annotations

from collections import OrderedDict

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
