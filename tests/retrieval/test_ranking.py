"""Rankings: order, ties, fusion, and the exactness of the fast BM25 sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.retrieval.index import bm25
from tunesmith.retrieval.index.bm25 import Postings, add_up, compute_bounds
from tunesmith.retrieval.index.bm25_kernel import Scratch, add_up_words
from tunesmith.retrieval.index.ranking import Ranking, fuse, rank


def test_equal_scores_are_ordered_by_id():
    id_ranks = np.array([3, 0, 2, 1], dtype=np.int32)
    scores = np.array([1.0, 1.0, 2.0, 1.0], dtype=np.float32)
    assert rank(np.arange(4), scores, 3, id_ranks).positions.tolist() == [2, 1, 3]


def test_a_shorter_ranking_is_the_beginning_of_a_longer_one():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 5, 200).astype(np.float32)
    id_ranks = rng.permutation(200).astype(np.int32)
    longest = rank(np.arange(200), scores, 200, id_ranks).positions.tolist()
    for top_n in (1, 7, 50, 199):
        assert rank(np.arange(200), scores, top_n, id_ranks).positions.tolist() == longest[:top_n]


def test_fusion_adds_reciprocal_ranks():
    first = Ranking(np.array([0, 1]), np.array([9.0, 8.0], dtype=np.float32))
    second = Ranking(np.array([2, 1]), np.array([0.5, 0.4], dtype=np.float32))
    fused = fuse([first, second], 3, np.arange(3, dtype=np.int32))
    assert fused.positions.tolist() == [1, 0, 2]  # 2/62, 1/61, 1/61: ties by id
    assert fused.scores.tolist() == pytest.approx([2 / 62, 1 / 61, 1 / 61], rel=1e-6)


words = st.lists(
    st.tuples(st.sets(st.integers(0, 299), min_size=1, max_size=200), st.floats(0.0625, 9, width=32)),
    min_size=1,
    max_size=6,
)


@given(
    words=words,
    top_n=st.integers(1, 40),
    seed=st.integers(0, 9),
    share=st.sampled_from([1, 64, 10**6]),
    small=st.sampled_from([0, 300]),
)
def test_the_best_sums_are_those_of_adding_up_everything(words, top_n, seed, share, small):
    postings, totals = draw_postings(words, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bm25, "DENSE_SHARE", share)
        patch.setattr(bm25, "SMALL_CORPUS", small)
        patch.setattr(bm25, "BLOCK", 4)
        patch.setattr(bm25, "LOOK_UP_COST", 0)
        positions, scores = add_up(postings, top_n, 300)
    check_best(positions, scores, totals, top_n)


@given(words=words, top_n=st.integers(1, 40), seed=st.integers(0, 9), cost=st.sampled_from([1, 4, 10**6]))
def test_the_compiled_sums_are_those_of_adding_up_everything(words, top_n, seed, cost):
    postings, totals = draw_postings(words, seed)
    ordered = sorted(postings, key=lambda each: -each.max_gain)
    ends = np.cumsum([len(each.positions) for each in ordered])
    scratch = Scratch(300)
    positions, scores = add_up_words(
        np.concatenate([each.positions for each in ordered]),
        np.concatenate([each.gains for each in ordered]),
        np.stack([ends - [len(each.positions) for each in ordered], ends], axis=1),
        np.ones(len(ordered), dtype=np.float32),
        compute_bounds(np.array([each.max_gain for each in ordered])),
        top_n,
        scratch.totals,
        cost,
    )
    assert not scratch.totals.any()
    check_best(positions, scores, totals, top_n)


def draw_postings(words, seed):
    """Postings of words given as (positions, largest gain), and the sums over all of them."""
    rng = np.random.default_rng(seed)
    postings, totals = [], np.zeros(300)
    for positions, scale in words:
        each = np.array(sorted(positions), dtype=np.int32)
        gains = (scale * rng.uniform(0.1, 1, len(each))).astype(np.float32)
        postings.append(Postings(positions=each, gains=gains, max_gain=float(gains.max())))
        totals[each] += gains
    return postings, totals


def check_best(positions, scores, totals, top_n):
    ranking = rank(positions, scores, top_n, np.arange(300, dtype=np.int32))
    expected = np.sort(totals[totals > 0])[::-1][:top_n]
    assert ranking.scores.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert totals[ranking.positions].tolist() == pytest.approx(ranking.scores.tolist(), rel=1e-5)
