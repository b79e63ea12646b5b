"""Shared prefixes of a batch, against batches worked by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.engine.batch.shared_prefixes import MIN_SHARED_TOKENS, SharedPrefixes, find_shared_prefixes

BLOCK = 64
MIN = MIN_SHARED_TOKENS // BLOCK


def find(
    tables: list[list[int]], positions: list[int], *, max_members: int = 8, max_prefixes: int = 8
) -> SharedPrefixes:
    return find_shared_prefixes(
        np.array(tables, dtype=np.int32), np.array(positions), block_size=BLOCK, max_members=max_members,
        max_prefixes=max_prefixes,
    )  # fmt: skip


def build_table(*parts: tuple[int, int]) -> list[int]:
    """Blocks of a request: for each part, as many consecutive numbers from the first one on."""
    return [block for first, count in parts for block in range(first, first + count)]


def list_ranges(shared: SharedPrefixes) -> dict[int, list[tuple[int, int]]]:
    """The ranges that each request attends to together with others."""
    order = shared.order_R.tolist()
    ranges: dict[int, list[tuple[int, int]]] = {row: [] for row in order}
    for first, size, start, stop in shared.prefixes_4N.T.tolist():
        for row in order[first : first + size]:
            ranges[row].append((start, stop))
    return ranges


def test_a_group_and_a_request_alone() -> None:
    tables = [build_table((0, MIN), (100, 4)), build_table((200, MIN + 4)), build_table((0, MIN), (300, 4))]
    shared = find(tables, [MIN * BLOCK + 5, MIN * BLOCK + 70, MIN * BLOCK + 9])
    assert list_ranges(shared) == {0: [(0, MIN * BLOCK)], 2: [(0, MIN * BLOCK)], 1: []}
    assert dict(zip(shared.order_R.tolist(), shared.starts_R.tolist(), strict=True)) == {
        0: MIN * BLOCK, 2: MIN * BLOCK, 1: 0,
    }  # fmt: skip


def test_a_prompt_below_a_system_prompt() -> None:
    system, end = (0, MIN), (900, 2)
    tables = [
        build_table(system, (100, MIN + 1), (10, 2)), build_table(system, (200, MIN + 3)),
        build_table(system, (100, MIN + 1), (20, 2)), build_table(system, (200, MIN), (30, 1), end),
    ]  # fmt: skip
    shared = find(tables, [(2 * MIN + 2) * BLOCK] * 4)
    whole, first, second = MIN * BLOCK, (2 * MIN + 1) * BLOCK, 2 * MIN * BLOCK
    assert list_ranges(shared) == {
        0: [(0, whole), (whole, first)], 2: [(0, whole), (whole, first)],
        1: [(0, whole), (whole, second)], 3: [(0, whole), (whole, second)],
    }  # fmt: skip
    assert sorted(shared.starts_R.tolist()) == [second, second, first, first]


def test_ranges_that_are_too_short_or_not_yet_full_are_not_shared() -> None:
    tables = [build_table((0, MIN), (100, 1)), build_table((0, MIN), (200, 1))]
    assert list_ranges(find(tables, [MIN * BLOCK, MIN * BLOCK]))[0] == [(0, MIN * BLOCK)]
    assert list_ranges(find(tables, [MIN * BLOCK, MIN * BLOCK - 1])) == {0: [], 1: []}
    tables = [build_table((0, MIN - 1), (100, 2)), build_table((0, MIN - 1), (200, 2))]
    assert list_ranges(find(tables, [MIN * BLOCK, MIN * BLOCK])) == {0: [], 1: []}


def test_a_prefix_that_is_in_the_cache_twice() -> None:
    """Two requests computed the same first block at once; a third found the first one's, and the second one's rest."""
    rest = (100, 2 * MIN)
    tables = [build_table((0, 1), (200, 2 * MIN)), build_table((1, 1), rest), build_table((0, 1), rest)]
    shared = find(tables, [2 * MIN * BLOCK + 5] * 3)
    assert list_ranges(shared) == {0: [], 1: [], 2: []}
    assert list_ranges(find([*tables, build_table((0, 1), rest)], [2 * MIN * BLOCK + 5] * 4)) == {
        0: [], 1: [], 2: [(0, 2 * MIN * BLOCK)], 3: [(0, 2 * MIN * BLOCK)],
    }  # fmt: skip


def test_large_groups_are_listed_in_parts_of_similar_size() -> None:
    tables = [build_table((0, MIN), (100 + row, 1)) for row in range(9)]
    shared = find(tables, [MIN * BLOCK + 1] * 9, max_members=8)
    assert shared.prefixes_4N.T.tolist() == [[0, 5, 0, MIN * BLOCK], [5, 4, 0, MIN * BLOCK]]


def test_beyond_the_limit_requests_read_alone() -> None:
    tables = [build_table((100 * (row // 2), MIN), (1000 + row, 1)) for row in range(6)]
    shared = find(tables, [MIN * BLOCK + 1] * 6, max_prefixes=2)
    assert shared.prefixes_4N.shape[1] == 2
    assert sorted(shared.starts_R.tolist()) == [0, 0] + [MIN * BLOCK] * 4


@given(st.data())
def test_every_token_is_attended_once(data: st.DataObject) -> None:
    """A random forest: the ranges of a request follow one another, and the blocks of a range are common."""
    tables: list[list[int]] = []
    for row in range(data.draw(st.integers(1, 8))):
        if tables and data.draw(st.booleans()):
            parent = data.draw(st.sampled_from(tables))
            kept = data.draw(st.integers(0, 5 * MIN))
            tables.append([*parent[:kept], *range(1000 * (row + 1) + kept, 1000 * (row + 1) + 5 * MIN)])
        else:
            tables.append(list(range(1000 * (row + 1), 1000 * (row + 1) + 5 * MIN)))
    positions = [data.draw(st.integers(0, 5 * MIN * BLOCK - 1)) for _ in tables]
    max_members, max_prefixes = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 6))
    shared = find(tables, positions, max_members=max_members, max_prefixes=max_prefixes)
    order = shared.order_R.tolist()
    assert sorted(order) == list(range(len(tables)))
    assert shared.prefixes_4N.shape[1] <= max_prefixes
    for row, ranges in list_ranges(shared).items():
        stops = [0, *(stop for _, stop in ranges)]
        assert [start for start, _ in ranges] == stops[:-1]
        assert shared.starts_R[order.index(row)] == stops[-1] <= positions[row]
    for first, size, start, stop in shared.prefixes_4N.T.tolist():
        assert 1 <= size <= max_members
        assert stop - start >= MIN_SHARED_TOKENS
        blocks = {tuple(tables[row][: stop // BLOCK]) for row in order[first : first + size]}
        assert len(blocks) == 1
