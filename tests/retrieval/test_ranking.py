"""Rankings: order, ties, fusion, and the sums of BM25."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.retrieval.index.bm25 import find_threshold
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


@given(
    scores=st.lists(st.sampled_from([0, 0, 0, 0.5, 1, 2.5]), min_size=1, max_size=400),
    top_n=st.integers(1, 12),
)
def test_at_least_top_n_passages_reach_the_threshold(scores, top_n):
    threshold = find_threshold(np.array(scores, dtype=np.float32), top_n)
    assert threshold == 0 or sum(score >= threshold for score in scores) >= top_n


def test_the_threshold_leaves_out_most_passages():
    scores = np.random.default_rng(0).permutation(64_000).astype(np.float32)
    assert np.count_nonzero(scores >= find_threshold(scores, 10)) < 20
