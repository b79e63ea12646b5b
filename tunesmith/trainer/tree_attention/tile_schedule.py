"""Which tiles of a row's tokens attend to which: what the attention kernels loop over.

A tile of `rows` queries goes over tiles of `steps` keys, and a tile of `rows` keys over tiles of `steps` queries. Of
each, the tiles come first in which every pair is seen, then those that hold seen and unseen pairs. All is worked out
from the trie; nothing of size [T, T] is made.

The keys of a prompt are seen by all answers, so a few tiles of keys would keep a few processors busy long after the
others are done: the queries of such a tile are dealt out to several shares, whose sums are added in a fixed order.

Axes: T tokens of the row (a multiple of both tiles), R tiles of rows, S tiles of steps, E shares, P places for sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tunesmith.experience.trie import Trie

PADDING = 128
"""Rows on a GPU are filled up to a multiple of this."""
LEAST_SHARE = 8
"""Tiles of queries that are not worth dealing out."""
MOST_PLACES = 256
"""For partial sums, whose memory this bounds: rows with more heavy tiles keep all processors busy as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tokens of one program and of one round of its loop, and how the kernels run."""

    rows: int
    steps: int
    num_warps: int
    num_stages: int
    num_backward_stages: int


NARROW = Tile(rows=64, steps=64, num_warps=4, num_stages=3, num_backward_stages=2)
"""For 16-bit numbers."""
LARGE = Tile(rows=64, steps=32, num_warps=8, num_stages=2, num_backward_stages=1)
"""For 16-bit numbers and heads larger than 128."""
WIDE = Tile(rows=32, steps=16, num_warps=4, num_stages=1, num_backward_stages=1)
"""For float32."""
TILES = {tile.steps: tile for tile in (NARROW, LARGE, WIDE)}


def choose_tile(head_size: int, *, is_wide: bool) -> Tile:
    """The tile that fits the registers."""
    if is_wide:
        return WIDE
    return NARROW if head_size <= 128 else LARGE


def pad_trie(trie: Trie, multiple: int = PADDING) -> Trie:
    """The trie with nodes at its end that see only themselves, up to a multiple; no event is theirs."""
    num_added = -trie.num_tokens % multiple
    zeros = np.zeros(num_added, dtype=np.int64)
    ends = np.arange(trie.num_tokens, trie.num_tokens + num_added) + 1
    return replace(
        trie,
        token_ids_T=np.concatenate([trie.token_ids_T, zeros]),
        depth_T=np.concatenate([trie.depth_T, zeros]),
        subtree_end_T=np.concatenate([trie.subtree_end_T, ends]),
    )


def build_table(trie: Trie, window: int | None, tile: Tile) -> np.ndarray:
    """One int32 array of parts, the last of which are the tiles that the others name.

    [T] ends of subtrees; [T] depths; [R, 4] for each tile of queries the tile, where its whole tiles begin in the
    array, where its mixed ones begin, and where those end; [R + P, 5] the same for each share of a tile of keys, and
    its place among partial sums or -1 for a tile in one share; [P, 3] each tile of keys that has shares, its first
    place and one past its last. What there is no share or tile for names tile -1. Much work stands first.
    """
    assert trie.num_tokens % tile.rows == 0, f"{trie.num_tokens} tokens do not fill tiles of {tile.rows}"
    num_rows = trie.num_tokens // tile.rows
    num_places = count_places(num_rows)
    head = 2 * trie.num_tokens + 4 * num_rows + 5 * (num_rows + num_places) + 3 * num_places
    query_rows, query_tiles = _list_tiles(*find_tiles(trie, window, tile.rows, tile.steps), first=head)
    is_seen_SR, is_full_SR = find_tiles(trie, window, tile.steps, tile.rows)
    key_rows, key_tiles = _list_tiles(is_seen_SR.T, is_full_SR.T, first=head + len(query_tiles))
    shares, sums = _deal_out(key_rows, num_places)
    named = (query_rows, _fill_up(shares, num_rows + num_places), _fill_up(sums, num_places))
    parts = (trie.subtree_end_T, trie.depth_T, *(rows.ravel() for rows in named), query_tiles, key_tiles)
    return np.concatenate(parts).astype(np.int32)


def count_places(num_rows: int) -> int:
    """Most shares of tiles of keys that are dealt out."""
    return min(num_rows // 2, MOST_PLACES)


def compute_table_size(num_tokens: int, tile: Tile) -> int:
    """Length that `build_table` cannot exceed: every tile names all others."""
    num_rows, num_steps = num_tokens // tile.rows, num_tokens // tile.steps
    return 2 * num_tokens + 9 * num_rows + 8 * count_places(num_rows) + 2 * num_rows * num_steps


def find_tiles(trie: Trie, window: int | None, num_queries: int, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles of (queries, keys) may hold a pair that is seen, and which of those hold only such pairs."""
    first_query = np.arange(0, trie.num_tokens, num_queries)[:, None]
    last_query = np.minimum(first_query + num_queries, trie.num_tokens) - 1
    first_key = np.arange(0, trie.num_tokens, num_keys)
    last_key = np.minimum(first_key + num_keys, trie.num_tokens) - 1
    is_seen = (first_key <= last_query) & (np.maximum.reduceat(trie.subtree_end_T, first_key) > first_query)
    is_full = (last_key <= first_query) & (np.minimum.reduceat(trie.subtree_end_T, first_key) > last_query)
    if window is not None:
        depth_T = trie.depth_T
        least_query, most_query = (f.reduceat(depth_T, first_query[:, 0])[:, None] for f in (np.minimum, np.maximum))
        least_key, most_key = (f.reduceat(depth_T, first_key) for f in (np.minimum, np.maximum))
        is_seen &= least_query - most_key < window
        is_full &= most_query - least_key < window
        is_seen |= (first_key <= last_query) & (last_key >= first_query)
    return is_seen, is_full


def _list_tiles(is_seen_RS: np.ndarray, is_full_RS: np.ndarray, *, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The four numbers of each row and the tiles that all rows name, which will stand at `first`."""
    is_mixed_RS = is_seen_RS & ~is_full_RS
    num_full_R, num_mixed_R = is_full_RS.sum(axis=1), is_mixed_RS.sum(axis=1)
    end_R = first + np.cumsum(num_full_R + num_mixed_R)
    middle_R = end_R - num_mixed_R
    rows = np.stack([np.arange(len(end_R)), middle_R - num_full_R, middle_R, end_R], axis=1)
    _, tiles = np.nonzero(np.concatenate([is_full_RS, is_mixed_RS], axis=1))
    order_R = np.argsort(-(num_full_R + num_mixed_R), kind="stable")
    return rows[order_R], tiles % is_seen_RS.shape[1]


def _deal_out(rows: np.ndarray, num_places: int) -> tuple[np.ndarray, np.ndarray]:
    """Shares [E, 5] of the rows' tiles, and what is summed where [., 3].

    No share is more than twice the mean row's work, or what is more has no places left.
    """
    tile_R, begin_R, middle_R, end_R = rows.T
    num_R = end_R - begin_R
    limit = max(LEAST_SHARE, 2 * math.ceil(num_R.mean()))
    while -(-num_R[num_R > limit] // limit).sum() > num_places:
        limit += limit // 2
    num_shares_R = np.maximum(-(-num_R // limit), 1)
    is_dealt_R = num_shares_R > 1
    row_E = np.repeat(np.arange(len(rows)), num_shares_R)
    share_E = np.arange(len(row_E)) - np.repeat(np.cumsum(num_shares_R) - num_shares_R, num_shares_R)
    begin_E = begin_R[row_E] + num_R[row_E] * share_E // num_shares_R[row_E]
    end_E = begin_R[row_E] + num_R[row_E] * (share_E + 1) // num_shares_R[row_E]
    middle_E = np.clip(middle_R[row_E], begin_E, end_E)
    place_E = np.where(is_dealt_R[row_E], np.cumsum(is_dealt_R[row_E]) - 1, -1)
    shares = np.stack([tile_R[row_E], begin_E, middle_E, end_E, place_E], axis=1)
    last_D = np.cumsum(num_shares_R[is_dealt_R])
    sums = np.stack([tile_R[is_dealt_R], last_D - num_shares_R[is_dealt_R], last_D], axis=1)
    return shares[np.argsort(begin_E - end_E, kind="stable")], sums


def _fill_up(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """So many rows; those that are added are -1 throughout."""
    filled = np.full((num_rows, rows.shape[1]), -1, dtype=np.int64)
    filled[: len(rows)] = rows
    return filled
