"""Triton kernels of tree attention: one launch for all paths of a row.

Query q attends to key k when k <= q < subtree_end[k], and within a window of depths if there is one. A program owns a
tile of queries (or of keys, for their gradients) and loops over the tiles on the other side with a visible pair: first
full tiles, in which every pair is visible, then mixed tiles, which need the mask. Tiles of keys with many queries are
split across programs (see `tile_schedule.py` for the table). The softmax is online (Milakov and Gimelshein, 2018); the
backward recomputes the weights from the row's log-sum (Dao, 2023, algorithm 2). Gradients are summed in a fixed order,
without atomics.

Axes: T tokens (a multiple of the tile), H query heads, K key-value heads, D head size, M queries and N keys of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MASKED_SCORE = tl.constexpr(-1.0e30)
"""Score of a masked pair: finite, so that a tile without a visible key does not produce NaN."""


@triton.jit
def _apply_softcap(scores, scaling, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scaled and capped scores if there is a softcap, else the unscaled dot products."""
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scaling / softcap * scores) - 1.0)
    return scores


@triton.jit
def _backward_softcap(slopes, scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """Gradients through the softcap."""
    if HAS_SOFTCAP:
        slopes *= 1.0 - (scores / softcap) * (scores / softcap)
    return slopes


@triton.jit
def _compute_log2_scale(scaling, HAS_SOFTCAP: tl.constexpr):
    """Factor from the scores of `_apply_softcap` to base-2 logits."""
    if HAS_SOFTCAP:
        return LOG2E
    return scaling * LOG2E


@triton.jit
def _compute_mask(
    queries, keys, query_depths, table, num_tokens, window, HAS_WINDOW: tl.constexpr, IS_KEY_FIRST: tl.constexpr
):
    """Visible pairs of the tile: [M, N], or [N, M] if `IS_KEY_FIRST`."""
    ends = tl.load(table + keys)
    if IS_KEY_FIRST:
        is_visible = (keys[:, None] <= queries[None, :]) & (queries[None, :] < ends[:, None])
    else:
        is_visible = (keys[None, :] <= queries[:, None]) & (queries[:, None] < ends[None, :])
    if HAS_WINDOW:
        key_depths = tl.load(table + num_tokens + keys)
        if IS_KEY_FIRST:
            is_visible &= query_depths[None, :] - key_depths[:, None] < window
        else:
            is_visible &= query_depths[:, None] - key_depths[None, :] < window
    return is_visible


@triton.jit
def _load_tile(base, rows, sizes, stride, is_size, HAS_PADDING: tl.constexpr):
    places = base + rows[:, None] * stride + sizes[None, :]
    if HAS_PADDING:
        return tl.load(places, mask=is_size[None, :], other=0.0)
    return tl.load(places)


@triton.jit
def _store_tile(base, rows, sizes, stride, is_size, values, HAS_PADDING: tl.constexpr):
    places = base + rows[:, None] * stride + sizes[None, :]
    values = values.to(base.dtype.element_ty)
    if HAS_PADDING:
        tl.store(places, values, mask=is_size[None, :])
    else:
        tl.store(places, values)


@triton.jit
def _accumulate_output(
    mixed_MD, total_M, maximum_M, query_MD, key, value, table, begin, end,
    queries, depths, sizes, is_size, scaling, softcap, window, num_tokens, key_stride, value_stride,
    TILE_N: tl.constexpr, IS_FULL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over tiles of keys."""
    factor = _compute_log2_scale(scaling, HAS_SOFTCAP)
    for place in range(begin, end):
        keys = tl.load(table + place) * TILE_N + tl.arange(0, TILE_N)
        key_ND = _load_tile(key, keys, sizes, key_stride, is_size, HAS_PADDING)
        scores_MN = tl.dot(query_MD, tl.trans(key_ND), input_precision=PRECISION)
        scores_MN = _apply_softcap(scores_MN, scaling, softcap, HAS_SOFTCAP)
        if IS_FULL:
            new_maximum_M = tl.maximum(maximum_M, tl.max(scores_MN, axis=1) * factor)
            weights_MN = tl.exp2(scores_MN * factor - new_maximum_M[:, None])
        else:  # mask after scaling: a fused multiply-add would leave rounding of MASKED_SCORE in the exponent
            is_visible = _compute_mask(queries, keys, depths, table, num_tokens, window, HAS_WINDOW, False)
            scores_MN = tl.where(is_visible, scores_MN * factor, MASKED_SCORE)
            new_maximum_M = tl.maximum(maximum_M, tl.max(scores_MN, axis=1))
            weights_MN = tl.exp2(scores_MN - new_maximum_M[:, None])
        rescale_M = tl.exp2(maximum_M - new_maximum_M)
        total_M = total_M * rescale_M + tl.sum(weights_MN, axis=1)
        value_ND = _load_tile(value, keys, sizes, value_stride, is_size, HAS_PADDING)
        mixed_MD = mixed_MD * rescale_M[:, None]
        mixed_MD = tl.dot(weights_MN.to(value_ND.dtype), value_ND, mixed_MD, input_precision=PRECISION)
        maximum_M = new_maximum_M
    return mixed_MD, total_M, maximum_M


@triton.jit
def attention_forward(
    query, key, value, output, log_sums, sinks, table, scaling, softcap, window, num_tokens,
    query_stride_t, query_stride_h, key_stride_t, key_stride_h, value_stride_t, value_stride_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    entry = table + 2 * num_tokens + 4 * row
    queries = tl.load(entry) * TILE_M + tl.arange(0, TILE_M)
    begin, middle, end = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    sizes = tl.arange(0, SIZE_PAD)
    is_size = sizes < SIZE
    query_MD = _load_tile(query + head * query_stride_h, queries, sizes, query_stride_t, is_size, SIZE != SIZE_PAD)
    key += (head // GROUPS) * key_stride_h
    value += (head // GROUPS) * value_stride_h
    depths = queries
    if HAS_WINDOW:
        depths = tl.load(table + num_tokens + queries)
    mixed_MD = tl.zeros((TILE_M, SIZE_PAD), tl.float32)
    total_M, maximum_M = tl.zeros((TILE_M,), tl.float32), tl.full((TILE_M,), MASKED_SCORE, tl.float32)
    mixed_MD, total_M, maximum_M = _accumulate_output(
        mixed_MD, total_M, maximum_M, query_MD, key, value, table, begin, middle,
        queries, depths, sizes, is_size, scaling, softcap, window, num_tokens, key_stride_t, value_stride_t,
        TILE_N, True, HAS_SOFTCAP, HAS_WINDOW, SIZE != SIZE_PAD, PRECISION,
    )  # fmt: skip
    mixed_MD, total_M, maximum_M = _accumulate_output(
        mixed_MD, total_M, maximum_M, query_MD, key, value, table, middle, end,
        queries, depths, sizes, is_size, scaling, softcap, window, num_tokens, key_stride_t, value_stride_t,
        TILE_N, False, HAS_SOFTCAP, HAS_WINDOW, SIZE != SIZE_PAD, PRECISION,
    )  # fmt: skip
    if HAS_SINKS:  # the backward needs no more than their part of output and log-sum
        total_M += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2E - maximum_M)
    mixed_MD = mixed_MD / total_M[:, None]  # never 0: a token attends to itself
    _store_tile(output + head * SIZE, queries, sizes, HEADS * SIZE, is_size, mixed_MD, SIZE != SIZE_PAD)
    tl.store(log_sums + head * num_tokens + queries, maximum_M + tl.log2(total_M))


@triton.jit
def _accumulate_key_value_grads(
    grad_key_ND, grad_value_ND, key_ND, value_ND, query, grad, log_sums, deltas, table, begin, end,
    keys, sizes, is_size, scaling, softcap, window, num_tokens,
    query_stride_t, query_stride_h, grad_stride_t, grad_stride_h,
    GROUPS: tl.constexpr, TILE_M: tl.constexpr, IS_FULL: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulate gradients of a tile of keys and values over tiles of queries, of all heads of the group."""
    factor = _compute_log2_scale(scaling, HAS_SOFTCAP)
    # one loop over heads and tiles: nested loops would start the pipeline of loads again for each head
    place, group = begin, 0
    for _ in range((end - begin) * GROUPS):
        queries = tl.load(table + place) * TILE_M + tl.arange(0, TILE_M)
        query_MD = _load_tile(query + group * query_stride_h, queries, sizes, query_stride_t, is_size, HAS_PADDING)
        scores_NM = tl.dot(key_ND, tl.trans(query_MD), input_precision=PRECISION)
        scores_NM = _apply_softcap(scores_NM, scaling, softcap, HAS_SOFTCAP)
        log_sums_M = tl.load(log_sums + group * num_tokens + queries)
        weights_NM = tl.exp2(scores_NM * factor - log_sums_M[None, :])
        if not IS_FULL:
            depths = queries
            if HAS_WINDOW:
                depths = tl.load(table + num_tokens + queries)
            is_visible = _compute_mask(queries, keys, depths, table, num_tokens, window, HAS_WINDOW, True)
            weights_NM = tl.where(is_visible, weights_NM, 0.0)
        grad_MD = _load_tile(grad + group * grad_stride_h, queries, sizes, grad_stride_t, is_size, HAS_PADDING)
        grad_value_ND = tl.dot(weights_NM.to(grad_MD.dtype), grad_MD, grad_value_ND, input_precision=PRECISION)
        deltas_M = tl.load(deltas + group * num_tokens + queries)
        slopes_NM = tl.dot(value_ND, tl.trans(grad_MD), input_precision=PRECISION)
        slopes_NM = weights_NM * (slopes_NM - deltas_M[None, :])
        slopes_NM = _backward_softcap(slopes_NM, scores_NM, softcap, HAS_SOFTCAP)
        grad_key_ND = tl.dot(slopes_NM.to(query_MD.dtype), query_MD, grad_key_ND, input_precision=PRECISION)
        place += 1
        is_last = place == end
        group = tl.where(is_last, group + 1, group)
        place = tl.where(is_last, begin, place)
    return grad_key_ND, grad_value_ND


@triton.jit
def backward_key_value(
    query, key, value, grad, log_sums, deltas, grad_key, grad_value, sums, table, scaling, softcap, window, num_tokens,
    query_stride_t, query_stride_h, key_stride_t, key_stride_h, value_stride_t, value_stride_h,
    grad_stride_t, grad_stride_h,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, QUERY_ROWS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of a tile of keys; the partial sums [P, K, 2, N, D] of split tiles go to `reduce_key_value_grads`.

    `QUERY_ROWS` is the tile of the other kernels, whose entries precede these in the table."""
    row, head = tl.program_id(0), tl.program_id(1)
    entry = table + 2 * num_tokens + 4 * (num_tokens // QUERY_ROWS) + 5 * row
    tile = tl.load(entry)
    if tile < 0:  # the grid has room for all splits that a row of this length may need, so a CUDA graph fits every trie
        return
    keys = tile * TILE_N + tl.arange(0, TILE_N)
    begin, middle, end, place = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)
    sizes = tl.arange(0, SIZE_PAD)
    is_size = sizes < SIZE
    key_ND = _load_tile(key + head * key_stride_h, keys, sizes, key_stride_t, is_size, SIZE != SIZE_PAD)
    value_ND = _load_tile(value + head * value_stride_h, keys, sizes, value_stride_t, is_size, SIZE != SIZE_PAD)
    query += head * GROUPS * query_stride_h
    grad += head * GROUPS * grad_stride_h
    log_sums += head * GROUPS * num_tokens
    deltas += head * GROUPS * num_tokens
    grad_key_ND = tl.zeros((TILE_N, SIZE_PAD), tl.float32)
    grad_value_ND = tl.zeros((TILE_N, SIZE_PAD), tl.float32)
    grad_key_ND, grad_value_ND = _accumulate_key_value_grads(
        grad_key_ND, grad_value_ND, key_ND, value_ND, query, grad, log_sums, deltas, table, begin, middle,
        keys, sizes, is_size, scaling, softcap, window, num_tokens,
        query_stride_t, query_stride_h, grad_stride_t, grad_stride_h,
        GROUPS, TILE_M, True, HAS_SOFTCAP, HAS_WINDOW, SIZE != SIZE_PAD, PRECISION,
    )  # fmt: skip
    grad_key_ND, grad_value_ND = _accumulate_key_value_grads(
        grad_key_ND, grad_value_ND, key_ND, value_ND, query, grad, log_sums, deltas, table, middle, end,
        keys, sizes, is_size, scaling, softcap, window, num_tokens,
        query_stride_t, query_stride_h, grad_stride_t, grad_stride_h,
        GROUPS, TILE_M, False, HAS_SOFTCAP, HAS_WINDOW, SIZE != SIZE_PAD, PRECISION,
    )  # fmt: skip
    if place < 0:
        stride = KV_HEADS * SIZE
        _store_tile(grad_key + head * SIZE, keys, sizes, stride, is_size, grad_key_ND * scaling, SIZE != SIZE_PAD)
        _store_tile(grad_value + head * SIZE, keys, sizes, stride, is_size, grad_value_ND, SIZE != SIZE_PAD)
    else:
        # scaled after the sum, as in tiles that are not split; 64 bits, as the offset may exceed 2^31
        sums += (place * KV_HEADS + head).to(tl.int64) * (2 * TILE_N * SIZE)
        rows = tl.arange(0, TILE_N)
        _store_tile(sums, rows, sizes, SIZE, is_size, grad_key_ND, SIZE != SIZE_PAD)
        _store_tile(sums + TILE_N * SIZE, rows, sizes, SIZE, is_size, grad_value_ND, SIZE != SIZE_PAD)


@triton.jit(do_not_specialize=["num_sums"])  # one compiled kernel for any number of partial sums
def reduce_key_value_grads(
    sums, grad_key, grad_value, table, scaling, num_tokens, num_sums,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, TILE_N: tl.constexpr, QUERY_ROWS: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a split tile of keys."""
    row, head = tl.program_id(0), tl.program_id(1)
    num_splits = num_tokens // TILE_N + num_sums
    entry = table + 2 * num_tokens + 4 * (num_tokens // QUERY_ROWS) + 5 * num_splits + 3 * row
    tile = tl.load(entry)
    if tile < 0:
        return
    rows, sizes = tl.arange(0, TILE_N), tl.arange(0, SIZE_PAD)
    is_size = sizes < SIZE
    grad_key_ND = tl.zeros((TILE_N, SIZE_PAD), tl.float32)
    grad_value_ND = tl.zeros((TILE_N, SIZE_PAD), tl.float32)
    for place in range(tl.load(entry + 1), tl.load(entry + 2)):
        part = sums + (place * KV_HEADS + head).to(tl.int64) * (2 * TILE_N * SIZE)
        grad_key_ND += _load_tile(part, rows, sizes, SIZE, is_size, SIZE != SIZE_PAD)
        grad_value_ND += _load_tile(part + TILE_N * SIZE, rows, sizes, SIZE, is_size, SIZE != SIZE_PAD)
    keys, stride = tile * TILE_N + rows, KV_HEADS * SIZE
    _store_tile(grad_key + head * SIZE, keys, sizes, stride, is_size, grad_key_ND * scaling, SIZE != SIZE_PAD)
    _store_tile(grad_value + head * SIZE, keys, sizes, stride, is_size, grad_value_ND, SIZE != SIZE_PAD)


@triton.jit
def _accumulate_query_grads(
    grad_query_MD, query_MD, grad_MD, log_sums_M, deltas_M, key, value, table, begin, end,
    queries, depths, sizes, is_size, scaling, softcap, window, num_tokens, key_stride, value_stride,
    TILE_N: tl.constexpr, IS_FULL: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_PADDING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    factor = _compute_log2_scale(scaling, HAS_SOFTCAP)
    for place in range(begin, end):
        keys = tl.load(table + place) * TILE_N + tl.arange(0, TILE_N)
        key_ND = _load_tile(key, keys, sizes, key_stride, is_size, HAS_PADDING)
        scores_MN = tl.dot(query_MD, tl.trans(key_ND), input_precision=PRECISION)
        scores_MN = _apply_softcap(scores_MN, scaling, softcap, HAS_SOFTCAP)
        weights_MN = tl.exp2(scores_MN * factor - log_sums_M[:, None])
        if not IS_FULL:
            is_visible = _compute_mask(queries, keys, depths, table, num_tokens, window, HAS_WINDOW, False)
            weights_MN = tl.where(is_visible, weights_MN, 0.0)
        value_ND = _load_tile(value, keys, sizes, value_stride, is_size, HAS_PADDING)
        slopes_MN = tl.dot(grad_MD, tl.trans(value_ND), input_precision=PRECISION)
        slopes_MN = weights_MN * (slopes_MN - deltas_M[:, None])
        slopes_MN = _backward_softcap(slopes_MN, scores_MN, softcap, HAS_SOFTCAP)
        grad_query_MD = tl.dot(slopes_MN.to(key_ND.dtype), key_ND, grad_query_MD, input_precision=PRECISION)
    return grad_query_MD


@triton.jit
def backward_query(
    query, key, value, output, grad, log_sums, deltas, grad_query, table, scaling, softcap, window, num_tokens,
    query_stride_t, query_stride_h, key_stride_t, key_stride_h, value_stride_t, value_stride_h,
    grad_stride_t, grad_stride_h,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Also writes deltas[h, t] = <output, its gradient>, which `backward_key_value` reads."""
    row, head = tl.program_id(0), tl.program_id(1)
    entry = table + 2 * num_tokens + 4 * row
    queries = tl.load(entry) * TILE_M + tl.arange(0, TILE_M)
    begin, middle, end = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    sizes = tl.arange(0, SIZE_PAD)
    is_size = sizes < SIZE
    query_MD = _load_tile(query + head * query_stride_h, queries, sizes, query_stride_t, is_size, SIZE != SIZE_PAD)
    grad_MD = _load_tile(grad + head * grad_stride_h, queries, sizes, grad_stride_t, is_size, SIZE != SIZE_PAD)
    output_MD = _load_tile(output + head * SIZE, queries, sizes, HEADS * SIZE, is_size, SIZE != SIZE_PAD)
    log_sums_M = tl.load(log_sums + head * num_tokens + queries)
    # here and not in a kernel of its own: output and gradient of these queries are loaded anyway
    deltas_M = tl.sum(output_MD.to(tl.float32) * grad_MD.to(tl.float32), axis=1)
    tl.store(deltas + head * num_tokens + queries, deltas_M)
    key += (head // GROUPS) * key_stride_h
    value += (head // GROUPS) * value_stride_h
    depths = queries
    if HAS_WINDOW:
        depths = tl.load(table + num_tokens + queries)
    grad_query_MD = tl.zeros((TILE_M, SIZE_PAD), tl.float32)
    grad_query_MD = _accumulate_query_grads(
        grad_query_MD, query_MD, grad_MD, log_sums_M, deltas_M, key, value, table, begin, middle,
        queries, depths, sizes, is_size, scaling, softcap, window, num_tokens, key_stride_t, value_stride_t,
        TILE_N, True, HAS_SOFTCAP, HAS_WINDOW, SIZE != SIZE_PAD, PRECISION,
    )  # fmt: skip
    grad_query_MD = _accumulate_query_grads(
        grad_query_MD, query_MD, grad_MD, log_sums_M, deltas_M, key, value, table, middle, end,
        queries, depths, sizes, is_size, scaling, softcap, window, num_tokens, key_stride_t, value_stride_t,
        TILE_N, False, HAS_SOFTCAP, HAS_WINDOW, SIZE != SIZE_PAD, PRECISION,
    )  # fmt: skip
    grad_query_MD *= scaling
    _store_tile(grad_query + head * SIZE, queries, sizes, HEADS * SIZE, is_size, grad_query_MD, SIZE != SIZE_PAD)
