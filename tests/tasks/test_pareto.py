"""Group-wise Pareto sampling equals the definitions of dominance and crowding, question by question."""

from __future__ import annotations

import math
import statistics
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.errors import DataError
from tunesmith.et_agent.selection.pareto import divide_quota, select_pareto
from tunesmith.tasks.pareto import (
    compute_crowding,
    compute_spreads,
    find_fronts,
    find_mixed,
    read_rollouts,
    sort_by_front,
)

POINTS = st.lists(
    st.tuples(st.integers(0, 6).map(lambda n: n / 4), st.integers(0, 6).map(lambda n: n / 3)), min_size=1, max_size=40
)
GROUPS = st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=4, max_size=4), max_size=25)


def dominates(one, other):
    return all(a >= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def find_fronts_by_definition(points):
    """Fronts as NSGA-II defines them: remove the points that no other dominates, again and again."""
    ranks, left = {}, dict(enumerate(points))
    while left:
        front = [i for i, p in left.items() if not any(dominates(q, p) for q in left.values())]
        ranks |= dict.fromkeys(front, len(set(ranks.values())))
        for i in front:
            del left[i]
    return [ranks[i] for i in range(len(points))]


def compute_crowding_by_definition(points, ranks, ties):
    """The sum of normalized gaps between neighbors among the distinct points of a front; copies have 0."""
    distances = []
    for i, point in enumerate(points):
        front = sorted({tuple(p) for p, rank in zip(points, ranks, strict=True) if rank == ranks[i]})
        copies = [j for j, p in enumerate(points) if tuple(p) == tuple(point)]
        if len(front) == 1 or i != min(copies, key=lambda j: ties[j]):
            distances.append(0.0)
        elif tuple(point) in (front[0], front[-1]):
            distances.append(math.inf)
        else:
            at, total = front.index(tuple(point)), 0.0
            for axis in range(2):
                values = sorted(p[axis] for p in front)
                where = values.index(front[at][axis])
                total += (values[where + 1] - values[where - 1]) / (values[-1] - values[0])
            distances.append(total)
    return distances


@settings(max_examples=300, deadline=None)
@given(POINTS)
def test_fronts_equal_those_of_pairwise_comparison(points):
    assert find_fronts(np.array(points)).tolist() == find_fronts_by_definition(points)


@settings(max_examples=300, deadline=None)
@given(POINTS, st.randoms(use_true_random=False))
def test_crowding_distances_equal_their_definition(points, random):
    ties = random.sample(range(len(points)), len(points))
    ranks = find_fronts(np.array(points))
    found = compute_crowding(np.array(points), ranks, ties_N=np.array(ties))
    assert found.tolist() == pytest.approx(compute_crowding_by_definition(points, ranks.tolist(), ties))


def test_fronts_of_random_points_without_ties():
    points = np.random.default_rng(3).random((200, 2))
    assert find_fronts(points).tolist() == find_fronts_by_definition(points.tolist())


def test_an_objective_of_zero_range_has_no_infinite_distances():
    points = np.array([[0.5, 1.0], [0.5, 1.0], [0.5, 1.0]])
    ranks = find_fronts(points)
    assert ranks.tolist() == [0, 0, 0]
    assert compute_crowding(points, ranks, ties_N=np.array([2, 0, 1])).tolist() == [0, 0, 0]


def test_crowding_worked_by_hand():
    points = np.array([[0.0, 1.0], [0.25, 0.5], [1.0, 0.0], [0.25, 0.5], [0.0, 0.0]])
    ranks = find_fronts(points)
    assert ranks.tolist() == [0, 0, 0, 0, 1]
    ties = np.array([0, 1, 2, 3, 4])
    assert compute_crowding(points, ranks, ties_N=ties).tolist() == [math.inf, 2.0, math.inf, 0.0, 0.0]


def test_spreads_are_population_standard_deviations_independent_of_order():
    values = [[1, 0, 0, 1], [0, 1, 1, 0], [0.1, 0.1, 0.1], [], [2]]
    spreads = compute_spreads(values)
    assert spreads[:3].tolist() == [0.5, 0.5, 0.0]
    assert math.isnan(spreads[3]) and spreads[4] == 0
    scores = np.random.default_rng(0).random((50, 7))
    shuffled = np.random.default_rng(1).permuted(scores, axis=1)
    assert compute_spreads(scores.tolist()).tolist() == compute_spreads(shuffled.tolist()).tolist()
    assert compute_spreads(scores.tolist()) == pytest.approx([statistics.pstdev(row) for row in scores.tolist()])


def test_mixed_questions_have_a_right_and_a_wrong_rollout():
    correctness = [[0, 1], [1, 1], [0, 0], [0.75, 0.74], [0.7, 0.1], [1], []]
    assert find_mixed(correctness).tolist() == [True, False, False, True, False, False, False]


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.integers(1, 12), st.integers(0, 5))
def test_selection_removes_unmixed_questions_then_takes_the_best_fronts(groups, num_selected, seed):
    correctness = [[c for c, _ in group] for group in groups]
    calls = [[t for _, t in group] for group in groups]
    found = select_pareto(correctness, calls, num_selected=num_selected, seed=seed)
    mixed = [i for i, scores in enumerate(correctness) if 0 < sum(scores) < 4]
    assert found.num_mixed == len(mixed)
    assert set(found.indices.tolist()) <= set(mixed) and len(found.indices) == min(num_selected, len(mixed))
    assert len(set(found.indices.tolist())) == len(found.indices)
    points = [(statistics.pstdev(correctness[i]), statistics.pstdev(calls[i])) for i in mixed]
    points = [tuple(round(value, 12) for value in point) for point in points]
    rank_of = dict(zip(mixed, find_fronts_by_definition(points), strict=True))
    assert found.ranks.tolist() == [rank_of[i] for i in found.indices.tolist()]
    left = [rank_of[i] for i in mixed if i not in found.indices]
    assert not left or not len(found.ranks) or max(found.ranks) <= min(left)
    for rank in set(found.ranks.tolist()):
        inside = found.distances[found.ranks == rank].tolist()
        assert inside == sorted(inside, reverse=True)


def test_ties_are_broken_by_the_seed():
    correctness, calls = [[0, 1]] * 50, [[1, 2]] * 50

    def select(seed):
        return select_pareto(correctness, calls, num_selected=5, seed=seed).indices.tolist()

    assert select(0) == select(0)
    assert len({tuple(select(seed)) for seed in range(5)}) == 5


def test_stratified_selection_keeps_the_shares_of_the_sources():
    correctness, calls = [[0, 1]] * 30, [[n % 5, 0] for n in range(30)]
    strata = ["math"] * 20 + ["qa"] * 10

    def count(num_selected, **more):
        found = select_pareto(correctness, calls, num_selected=num_selected, seed=0, strata=strata, **more)
        names = [strata[index] for index in found.indices]
        return names.count("math"), names.count("qa"), sorted(found.ranks.tolist()) == found.ranks.tolist()

    assert count(9) == (6, 3, True)
    assert count(10, shares={"math": 1, "qa": 1}) == (5, 5, True)
    assert count(24, shares={"math": 1, "qa": 1}) == (14, 10, True)
    assert count(25, shares={"qa": 1}) == (0, 10, True)


@given(st.integers(0, 60), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_quotas_add_up_and_stay_within_the_counts(total, sizes):
    counts = {str(number): size for number, size in enumerate(sizes)}
    quotas = divide_quota(total, counts, shares=None)
    assert sum(quotas.values()) == min(total, sum(sizes))
    assert all(quotas[name] <= counts[name] for name in counts)


def test_nothing_to_select_from_is_an_empty_selection():
    found = select_pareto([[1, 1], [0]], [[1, 2], [1]], num_selected=3, seed=0)
    assert found.indices.tolist() == [] and found.num_mixed == 0


def test_missing_and_misaligned_rollouts_are_errors():
    read = partial(read_rollouts, correctness_key="correctness", tool_calls_key="calls", where="row 3")
    with pytest.raises(DataError, match="row 3 has 2 values in correctness and 1 in calls"):
        read({"correctness": [0, 1], "calls": [1]})
    with pytest.raises(DataError, match="row 3 has no 'correctness'; its fields are a"):
        read({"a": 1})
    for wrong in ("1", [1, None], [math.nan], 3):
        with pytest.raises(DataError, match="must be a list of finite numbers"):
            read({"correctness": wrong})
    with pytest.raises(DataError, match="shares names the source 'web'"):
        divide_quota(3, {"math": 4}, shares={"web": 1})
    with pytest.raises(ValueError, match="an objective is not a number"):
        find_fronts(np.array([[0.0, np.nan]]))


def test_the_order_puts_the_best_front_first():
    points = np.array([[0.0, 0.0], [1.0, 1.0], [0.5, 0.5]])
    order, ranks, distances = sort_by_front(points, rng=np.random.default_rng(0))
    assert (order.tolist(), ranks.tolist(), distances.tolist()) == ([1, 2, 0], [0, 1, 2], [0, 0, 0])
