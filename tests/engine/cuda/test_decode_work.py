"""How decode batches are divided: which are cut, and that the lists hold every item."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.engine.cuda.decode_work import ALIGNMENT, Divider, Division, Kind

BLOCK = 16


def build_divider(*, num_kv_heads: int = 8, num_heads: int = 16, head_size: int = 128, window: int = 0) -> Divider:
    return Divider(
        block_size=BLOCK, num_kv_heads=num_kv_heads, num_heads=num_heads, head_size=head_size, num_sms=132,
        window=window,
    )  # fmt: skip


def divide(divider: Divider, lengths: list[int], *, num_shared: int = 0, num_steps: int = 16) -> Division:
    table = np.arange(len(lengths) * 4096, dtype=np.int32).reshape(len(lengths), 4096)
    table[:, : num_shared // BLOCK] = table[0, : num_shared // BLOCK]
    return divider.divide(table, np.array(lengths), num_steps=num_steps)


@pytest.mark.parametrize(
    ("lengths", "kind", "chunk"),
    [
        ([250] * 256, Kind.WHOLE, None),
        ([2048] * 256, Kind.WHOLE, None),
        ([4096] * 64, Kind.WHOLE, None),  # 512 programs of similar length
        ([20, 250], Kind.EVEN, 64),  # 16 programs would leave most multiprocessors idle
        ([2048] * 8, Kind.EVEN, 256),  # 17k tokens in at most 132 items of each head
        ([32000] * 8, Kind.EVEN, 2048),
        ([100] * 60 + [30000], Kind.UNEVEN, 512),  # at most 64 items of the longest
    ],
)
def test_batches_are_cut_by_their_lengths(lengths: list[int], kind: Kind, chunk: int | None) -> None:
    division = divide(build_divider(), lengths)
    assert division.kind is kind
    assert chunk is None or division.chunk == chunk


def test_shared_prefixes_divide_a_batch() -> None:
    division = divide(build_divider(), [2000] * 16, num_shared=1024)
    assert division.kind is Kind.UNEVEN
    assert division.prefixes.prefixes_4N.T.tolist() == [[0, 8, 0, 1024], [8, 8, 0, 1024]]
    heads_in_one_tile = build_divider(num_kv_heads=1, num_heads=16)
    assert not divide(heads_in_one_tile, [2000] * 16, num_shared=1024).prefixes.prefixes_4N.size


@given(st.data())
def test_items_never_exceed_the_list(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 40_000), min_size=1, max_size=40))
    num_shared = data.draw(st.sampled_from([0, 512, 5120]))
    lengths = [max(length, num_shared) for length in lengths]
    window, num_steps = data.draw(st.sampled_from([0, 100, 4096])), data.draw(st.integers(1, 64))
    heads = data.draw(st.sampled_from([(1, 1, 64), (2, 12, 128), (8, 16, 128), (8, 8, 256), (64, 64, 128)]))
    divider = build_divider(num_kv_heads=heads[0], num_heads=heads[1], head_size=heads[2], window=window)
    division = divide(divider, lengths, num_shared=num_shared, num_steps=num_steps)
    if division.kind is Kind.WHOLE:
        return
    starts = np.zeros(len(lengths), dtype=np.int64)
    if len(division.prefixes.order_R):
        starts[division.prefixes.order_R] = division.prefixes.starts_R
    num_shared_items = sum(
        -(-(stop - start // ALIGNMENT * ALIGNMENT) // division.chunk)
        for _, _, start, stop in division.prefixes.prefixes_4N.T.tolist()
    )
    capacity = divider.count_items(division.kind, len(lengths))
    for first in (starts, np.maximum(np.array(lengths) + num_steps + 1 - window, 0) if window else starts):
        stops = np.array(lengths) + num_steps
        counts = np.maximum(-(-(stops - first // ALIGNMENT * ALIGNMENT) // division.chunk), 1)
        assert counts.sum() + (num_shared_items if first is starts else 0) <= capacity
