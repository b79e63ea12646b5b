"""Decode attention against the formula in float64: splits, shared prefixes, windows, any lengths.

Runs on a GPU, or in Triton's interpreter where Triton is installed without one.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from tunesmith.engine.cuda.decode_work import DecodeWork, Divider, Kind
from tunesmith.engine.cuda.kernels.paged_decode import list_items, run_paged_decode

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
"""The interpreter multiplies no bfloat16."""
BLOCK = 16


class Batch:
    """Requests with random caches; the blocks of a shared prefix are the same."""

    def __init__(self, lengths: list[int], prefixes: list[tuple[list[int], int]], *, spare: int = 4) -> None:
        """`prefixes`: requests, and the number of blocks that they share from the start."""
        num_columns = max(lengths) // BLOCK + 1
        generator = np.random.default_rng(0)
        self.table_RP = generator.permutation(len(lengths) * num_columns).reshape(len(lengths), num_columns)
        self.table_RP = self.table_RP.astype(np.int32)
        self.num_blocks = self.table_RP.size + spare
        self.positions_R = np.array(lengths)
        for members, num_blocks in prefixes:
            self.table_RP[members, :num_blocks] = self.table_RP[members[0], :num_blocks]


def attend(
    query: Tensor, keys: Tensor, values: Tensor, *, scaling: float, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:  # fmt: skip
    """Attention [H, D] of one request's query [H, D] over keys and values [K, S, D], all in float64."""
    if window:
        keys, values = keys[:, -window:], values[:, -window:]
    scores = torch.einsum("kgd,ksd->kgs", query.unflatten(0, (len(keys), -1)), keys) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    added = scores[..., :0] if sinks is None else sinks.double().view(len(keys), -1, 1)
    weights = torch.cat([scores, added], -1).softmax(-1)[..., : scores.shape[-1]]
    return torch.einsum("kgs,ksd->kgd", weights, values).flatten(0, 1)


def compare(
    batch: Batch, *, heads: int, kv_heads: int, size: int, dtype: torch.dtype, window: int = 0,
    softcap: float = 0.0, num_sms: int = 1, has_sinks: bool = False,
) -> Any:  # fmt: skip
    """Run several layers with one list of items, which is returned."""
    torch.manual_seed(0)
    positions = torch.from_numpy(batch.positions_R).to(DEVICE)
    divider = Divider(
        block_size=BLOCK, num_kv_heads=kv_heads, num_heads=heads, head_size=size, num_sms=num_sms, window=window
    )
    division = divider.divide(batch.table_RP, batch.positions_R, num_steps=1)
    division_7S = np.zeros((7, len(positions) + 3), dtype=np.int32)
    division.fill(division_7S)
    work = DecodeWork.allocate(divider, division.kind, positions, torch.from_numpy(division_7S).to(DEVICE))
    list_items(work)
    table = torch.from_numpy(batch.table_RP).to(DEVICE)
    num_rows = len(positions)
    sinks = torch.randn(heads, device=DEVICE) * 3 if has_sinks else None
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for _ in range(2 if DEVICE == "cuda" else 1):
        caches = [torch.randn(batch.num_blocks, kv_heads, BLOCK, size, device=DEVICE).to(dtype) for _ in range(2)]
        query, key, value = (
            torch.randn(1, n, num_rows, size, device=DEVICE).to(dtype) for n in (heads, kv_heads, kv_heads)
        )
        output = run_paged_decode(
            query, key, value, *caches, table, positions, work.items_2WF, work.parts_2R2, 0.1, window, softcap,
            sinks,
        )  # fmt: skip
        for row, position in enumerate(batch.positions_R.tolist()):
            context = [
                cache[table[row].long()].transpose(0, 1).flatten(1, 2)[:, : position + 1].double() for cache in caches
            ]
            for cached, new in zip(context, (key, value), strict=True):
                assert torch.equal(cached[:, -1], new[0, :, row].double())
            expected = attend(
                query[0, :, row].double(), *context, scaling=0.1, window=window, softcap=softcap, sinks=sinks
            )
            error = (output[0, row].double() - expected).norm() / expected.norm()
            assert error < tolerance, (row, position, float(error))
    if division.kind is Kind.WHOLE:
        return None
    items = work.items_2WF[0]
    return items[1 : 1 + int(items[0, 0])]


RAGGED = [0, 1, 15, 16, 17, 130, 290, 1290]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 3, 64), (4, 2, 128), (8, 1, 256), (7, 1, 96)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_contexts_equal_the_formula(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    assert compare(Batch(RAGGED, []), heads=heads, kv_heads=kv_heads, size=size, dtype=dtype) is not None


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (40, 5.0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_contexts_are_not_divided(window: int, softcap: float, dtype: torch.dtype) -> None:
    batch = Batch([0, 5, 16, 100, 127], [])
    assert compare(batch, heads=4, kv_heads=2, size=64, dtype=dtype, window=window, softcap=softcap) is None


@pytest.mark.parametrize(("window", "softcap"), [(40, 0.0), (700, 5.0)])
def test_windows_and_softcap_equal_the_formula(window: int, softcap: float) -> None:
    batch = Batch([*RAGGED, 1200], [([7, 8], 40)])
    items = compare(batch, heads=4, kv_heads=2, size=64, dtype=torch.float32, window=window, softcap=softcap)
    assert items is not None


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (4, 1), (7, 1)])
@pytest.mark.parametrize("dtype", DTYPES[::2])
def test_requests_that_share_prefixes_equal_the_formula(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """A system prompt of 33 blocks for all but one request, and two groups with longer prompts below it."""
    lengths = [550, 1250, 1300, 530, 1200, 1281, 1700, 33, 700]
    groups = [([0, 1, 2, 3, 4, 5, 6, 8], 33), ([1, 4, 6], 68), ([2, 5], 80)]
    items = compare(Batch(lengths, groups), heads=heads, kv_heads=kv_heads, size=64, dtype=dtype)
    if heads // kv_heads <= 2:  # 8 requests are one part
        num_read = int((items[:, 1] - items[:, 0]).sum())
        assert num_read == sum(lengths) - 7 * 33 * BLOCK - 2 * 35 * BLOCK - 47 * BLOCK


def test_a_long_context_is_cut_into_items_of_similar_length() -> None:
    items = compare(Batch([3000, 10, 200], []), heads=2, kv_heads=2, size=128, dtype=torch.float32)
    lengths = (items[:, 1] - items[:, 0]).tolist()
    assert sum(lengths) == 3210
    assert lengths[0] == lengths[1] == 256
    assert len(lengths) == math.ceil(3000 / 256) + 2


@pytest.mark.parametrize(("size", "window"), [(64, 0), (64, 40), (512, 0)])
def test_sinks_and_wide_heads_equal_the_formula(size: int, window: int) -> None:
    compare(Batch(RAGGED, []), heads=4, kv_heads=2, size=size, dtype=DTYPES[-1], window=window, has_sinks=True)
    long = compare(Batch([700, 40], []), heads=4, kv_heads=2, size=size, dtype=DTYPES[-1], num_sms=132, has_sinks=True)
    assert long is not None
