"""Block-sparse schedule of tree attention: which tiles of a row's tokens attend to which.

A program has a tile of queries and loops over tiles of keys; for the gradients of keys and values a program has a tile
of keys and loops over tiles of queries. Full tiles, in which every pair attends, come first, then mixed tiles, which
need the mask. The schedule is computed from the trie without an array of size [T, T].

All answers attend to the keys of their prompt, so a few tiles of keys would keep a few processors busy long after the
others are done. The work of such a tile is split across several programs, whose partial sums are added in a fixed
order.

Axes: T tokens of the row (a multiple of all tiles), R tiles of rows, S tiles of steps, K tiles of keys that have a
program, E splits (one program each), P partial sums, D tiles that are split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from tunesmith.experience.samples import Trie

PADDING = 128
"""Rows on a GPU are padded to a multiple of this."""
MIN_SPLIT_TILES = 8
"""Work of at most this many tiles is not split."""
MAX_PARTIAL_SUMS = 256
"""Bounds the memory of partial sums; rows with more heavy tiles keep all processors busy without splitting."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Tokens per program (`rows`) and per loop iteration (`steps`), and how the kernel is launched."""

    rows: int
    steps: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of the three kernels; those with queries as rows share a schedule."""

    forward: Tile
    backward_query: Tile
    backward_key_value: Tile


TILINGS = (
    Tiling(Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    Tiling(Tile(128, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 2)),
    Tiling(Tile(128, 64, 8, 2), Tile(128, 64, 8, 1), Tile(64, 64, 8, 2)),
    Tiling(*(Tile(32, 16, 4, 1),) * 3),
    Tiling(*(Tile(64, 64, 4, 2),) * 3),
    Tiling(*(Tile(64, 32, 8, 1),) * 2, Tile(32, 32, 4, 1)),
    Tiling(*(Tile(32, 16, 4, 1),) * 2, Tile(16, 16, 4, 1)),
)
"""For 16-bit types and head sizes up to 64, 128 and 256, and for float32 and wider heads; then the last three again for
GPUs other than Hopper, where each program may use as little as 99 KiB of shared memory. Those for 16 bits were the
fastest on an H200 (`results/training/train_cuda/tree_tiles.txt`)."""


def choose_tiling(head_size: int, *, is_wide: bool, is_hopper: bool = True) -> int:
    """Index in `TILINGS` of the tiling whose accumulators fit in registers, and its tiles in shared memory."""
    if head_size <= 64 and not is_wide:
        return 0
    tiling = 3 if is_wide or head_size > 256 else 1 if head_size <= 128 else 2
    return tiling if is_hopper else tiling + 3


def pad_trie(trie: Trie, multiple: int = PADDING) -> Trie:
    """Append nodes that attend only to themselves, up to a multiple of `multiple`; they have no events."""
    num_added = -trie.num_tokens % multiple
    zeros = np.zeros(num_added, dtype=np.int64)
    ends = np.arange(trie.num_tokens, trie.num_tokens + num_added) + 1
    return replace(
        trie,
        token_ids_T=np.concatenate([trie.token_ids_T, zeros]),
        depth_T=np.concatenate([trie.depth_T, zeros]),
        subtree_end_T=np.concatenate([trie.subtree_end_T, ends]),
    )


def build_table(trie: Trie, window: int | None, tiling: Tiling) -> np.ndarray:
    """The schedule as one int32 array of concatenated parts.

    [T] subtree ends; [T] depths; [R, 4] for each tile of queries: its index, and the offsets in this array of its first
    full tile, of its first mixed tile and past its last; [K + P, 5] the same for each split of a tile of keys, and the
    index of its partial sum, or -1 for a tile that is not split; [P, 3] for each split tile of keys: its index, its
    first partial sum and one past its last; then the lists of tiles that the offsets point to. Unused entries have tile
    index -1. Entries are sorted by decreasing work.
    """
    queries, keys = tiling.forward, tiling.backward_key_value
    assert trie.num_tokens % max(queries.rows, keys.rows) == 0, f"{trie.num_tokens} tokens do not fill {tiling}"
    num_keys = trie.num_tokens // keys.rows
    num_sums = count_partial_sums(num_keys)
    header = 2 * trie.num_tokens + 4 * (trie.num_tokens // queries.rows) + 5 * (num_keys + num_sums) + 3 * num_sums
    query_rows, query_tiles = _list_tiles(*classify_tiles(trie, window, queries.rows, queries.steps), first=header)
    is_visible_SK, is_full_SK = classify_tiles(trie, window, keys.steps, keys.rows)
    key_rows, key_tiles = _list_tiles(is_visible_SK.T, is_full_SK.T, first=header + len(query_tiles))
    splits, sums = _split_heavy_tiles(key_rows, num_sums)
    entries = (query_rows, _pad_rows(splits, num_keys + num_sums), _pad_rows(sums, num_sums))
    parts = (trie.subtree_end_T, trie.depth_T, *(rows.ravel() for rows in entries), query_tiles, key_tiles)
    return np.concatenate(parts).astype(np.int32)


def count_partial_sums(num_keys: int) -> int:
    """Maximum number of partial sums for a row of `num_keys` tiles of keys."""
    return min(num_keys // 2, MAX_PARTIAL_SUMS)


def compute_table_size(num_tokens: int, tiling: Tiling) -> int:
    """Upper bound of the length of `build_table`: every tile attends to all others."""
    num_queries, num_keys = (num_tokens // tile.rows for tile in (tiling.forward, tiling.backward_key_value))
    header = 2 * num_tokens + 4 * num_queries + 5 * num_keys + 8 * count_partial_sums(num_keys)
    return (
        header
        + num_queries * (num_tokens // tiling.forward.steps)
        + num_keys * (num_tokens // tiling.backward_key_value.steps)
    )


def classify_tiles(trie: Trie, window: int | None, num_queries: int, num_keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles of (queries, keys) that may have a visible pair, and those of them in which every pair is visible."""
    first_query = np.arange(0, trie.num_tokens, num_queries)[:, None]
    last_query = np.minimum(first_query + num_queries, trie.num_tokens) - 1
    first_key = np.arange(0, trie.num_tokens, num_keys)
    last_key = np.minimum(first_key + num_keys, trie.num_tokens) - 1
    is_visible = (first_key <= last_query) & (np.maximum.reduceat(trie.subtree_end_T, first_key) > first_query)
    is_full = (last_key <= first_query) & (np.minimum.reduceat(trie.subtree_end_T, first_key) > last_query)
    if window is not None:
        depth_T = trie.depth_T
        least_query, most_query = (f.reduceat(depth_T, first_query[:, 0])[:, None] for f in (np.minimum, np.maximum))
        least_key, most_key = (f.reduceat(depth_T, first_key) for f in (np.minimum, np.maximum))
        is_visible &= least_query - most_key < window
        is_full &= most_query - least_key < window
        is_visible |= (first_key <= last_query) & (last_key >= first_query)
    return is_visible, is_full


def _list_tiles(is_visible_RS: np.ndarray, is_full_RS: np.ndarray, *, first: int) -> tuple[np.ndarray, np.ndarray]:
    """The entries [R, 4] and the concatenated lists of tiles, which will start at offset `first`."""
    is_mixed_RS = is_visible_RS & ~is_full_RS
    num_full_R, num_mixed_R = is_full_RS.sum(axis=1), is_mixed_RS.sum(axis=1)
    end_R = first + np.cumsum(num_full_R + num_mixed_R)
    middle_R = end_R - num_mixed_R
    rows = np.stack([np.arange(len(end_R)), middle_R - num_full_R, middle_R, end_R], axis=1)
    _, tiles = np.nonzero(np.concatenate([is_full_RS, is_mixed_RS], axis=1))
    order_R = np.argsort(-(num_full_R + num_mixed_R), kind="stable")
    return rows[order_R], tiles % is_visible_RS.shape[1]


def _split_heavy_tiles(rows: np.ndarray, num_sums: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits [E, 5] of the rows' work, and the partial sums [D, 3] of each split row.

    Partial sums have fixed places, and are added in their order: atomic additions would round differently each time.
    A split has at most twice the mean work of a row, or more if that would need more than `num_sums` partial sums.
    """
    tile_R, begin_R, middle_R, end_R = rows.T
    num_R = end_R - begin_R
    limit = max(MIN_SPLIT_TILES, 2 * math.ceil(num_R.mean()))
    while -(-num_R[num_R > limit] // limit).sum() > num_sums:
        limit += limit // 2
    num_splits_R = np.maximum(-(-num_R // limit), 1)
    is_split_R = num_splits_R > 1
    row_E = np.repeat(np.arange(len(rows)), num_splits_R)
    split_E = np.arange(len(row_E)) - np.repeat(np.cumsum(num_splits_R) - num_splits_R, num_splits_R)
    begin_E = begin_R[row_E] + num_R[row_E] * split_E // num_splits_R[row_E]
    end_E = begin_R[row_E] + num_R[row_E] * (split_E + 1) // num_splits_R[row_E]
    middle_E = np.clip(middle_R[row_E], begin_E, end_E)
    sum_E = np.where(is_split_R[row_E], np.cumsum(is_split_R[row_E]) - 1, -1)
    splits = np.stack([tile_R[row_E], begin_E, middle_E, end_E, sum_E], axis=1)
    last_D = np.cumsum(num_splits_R[is_split_R])
    sums = np.stack([tile_R[is_split_R], last_D - num_splits_R[is_split_R], last_D], axis=1)
    return splits[np.argsort(begin_E - end_E, kind="stable")], sums


def _pad_rows(rows: np.ndarray, num_rows: int) -> np.ndarray:
    padded = np.full((num_rows, rows.shape[1]), -1, dtype=np.int64)
    padded[: len(rows)] = rows
    return padded
