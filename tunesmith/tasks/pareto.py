"""Pareto fronts of questions by the spreads of their rollouts (ET-Agent, arXiv:2601.06860, section 3.3).

Each question has K rollouts. Its two objectives, both maximized, are the population standard deviation of their
correctness and of their numbers of tool calls. Within a front, questions are ordered by their crowding distance.

Results depend on the multiset of each question's rollouts, on the order of the questions and on the seed alone. Fronts
of two objectives are found in O(n log n). Axes: N questions, P distinct points, K rollouts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from tunesmith.errors import ConfigError, DataError
from tunesmith.tasks.load import read_field
from tunesmith.tasks.selector import Choice, Floats, Indices, Selection, Share, build_histogram
from tunesmith.types import Group, Task, Trajectory, compute_outcome, read_metric

CORRECT_AT = 0.75
"""Correctness from which a rollout counts as right: 1 of 0 and 1, or a token F1 of 0.75 as in ET-Agent."""


def compute_spreads(values: Sequence[Sequence[float]]) -> Floats:
    """Population standard deviation of each question's values, independent of their order; NaN without values."""
    spreads_N = np.full(len(values), np.nan)
    lengths_N = np.fromiter((len(each) for each in values), dtype=np.int64, count=len(values))
    for length in np.unique(lengths_N[lengths_N > 0]).tolist():
        chosen = np.flatnonzero(lengths_N == length)
        rows = values if len(chosen) == len(values) else [values[index] for index in chosen.tolist()]
        values_NK = np.sort(np.asarray(rows, dtype=np.float64), axis=1)
        is_constant_N = values_NK[:, 0] == values_NK[:, -1]
        spreads_N[chosen] = np.where(is_constant_N, 0.0, values_NK.std(axis=1))
    return spreads_N


def find_mixed(correctness: Sequence[Sequence[float]], *, correct_at: float = CORRECT_AT) -> NDArray[np.bool_]:
    """Whether a question has a right and a wrong rollout: correctness of at least `correct_at`, and below it."""
    lowest_N = np.fromiter((min(each, default=np.nan) for each in correctness), np.float64, len(correctness))
    highest_N = np.fromiter((max(each, default=np.nan) for each in correctness), np.float64, len(correctness))
    return np.asarray((lowest_N < correct_at) & (highest_N >= correct_at))


def find_fronts(points_N2: Floats) -> Indices:
    """The number of the non-dominated front of each point, from 0; both objectives are maximized.

    A point dominates another if it is at least as large in both objectives and larger in one, so equal points share a
    front. Points are visited in descending order; a point belongs to the first front whose largest second objective is
    below its own. O(n log n).
    """
    if np.isnan(points_N2).any():
        raise ValueError("an objective is not a number; remove questions without rollouts first")
    order_N = np.lexsort((-points_N2[:, 1], -points_N2[:, 0]))
    sorted_N2 = points_N2[order_N]
    is_new_N = np.ones(len(points_N2), dtype=bool)
    is_new_N[1:] = (sorted_N2[1:] != sorted_N2[:-1]).any(axis=1)
    fronts_P: list[int] = []
    lowest: list[float] = []  # per front, minus the largest second objective so far; ascending
    for negated in (-sorted_N2[is_new_N, 1]).tolist():
        front = bisect_right(lowest, negated)
        if front == len(lowest):
            lowest.append(negated)
        else:
            lowest[front] = negated
        fronts_P.append(front)
    ranks_N = np.empty(len(points_N2), dtype=np.int64)
    ranks_N[order_N] = np.asarray(fronts_P, dtype=np.int64)[np.cumsum(is_new_N) - 1]
    return ranks_N


def compute_crowding(points_N2: Floats, ranks_N: Indices, *, ties_N: Indices) -> Floats:
    """Crowding distance of each point in its front (NSGA-II; Deb et al., 2002), larger where neighbors are farther.

    The distances are those of the distinct points of a front: per objective, the gap between the two neighbors over the
    range of the front. The two ends of a front have infinite distance. A front of one distinct point has no range, and
    distance 0. Of equal points the one with the smallest of `ties_N` has the distance, the others have a neighbor in
    the same place and distance 0.
    """
    distances_N = np.zeros(len(points_N2))
    if not len(points_N2):
        return distances_N
    order_N = np.lexsort((ties_N, points_N2[:, 0], ranks_N))  # in a front the second objective falls as the first rises
    ranks, points = ranks_N[order_N], points_N2[order_N]
    is_new_N = np.ones(len(order_N), dtype=bool)
    is_new_N[1:] = (ranks[1:] != ranks[:-1]) | (points[1:] != points[:-1]).any(axis=1)
    first_P = order_N[is_new_N]
    ranks_P, points_P2 = ranks_N[first_P], points_N2[first_P]
    start_P = np.searchsorted(ranks_P, ranks_P, side="left")
    end_P = np.searchsorted(ranks_P, ranks_P, side="right") - 1
    position_P = np.arange(len(first_P))
    is_alone_P = start_P == end_P
    is_end_P = (position_P == start_P) | (position_P == end_P)
    before_P, after_P = np.maximum(position_P - 1, start_P), np.minimum(position_P + 1, end_P)
    range_P2 = np.abs(points_P2[end_P] - points_P2[start_P])
    gap_P2 = np.abs(points_P2[after_P] - points_P2[before_P])
    inner_P = (gap_P2 / np.where(is_alone_P[:, None], 1.0, range_P2)).sum(axis=1)
    distances_N[first_P] = np.where(is_alone_P, 0.0, np.where(is_end_P, np.inf, inner_P))
    return distances_N


def sort_by_front(points_N2: Floats, *, rng: np.random.Generator) -> tuple[Indices, Indices, Floats]:
    """The points by front, then by descending crowding distance, then at random; with their fronts and distances."""
    ranks_N, ties_N = find_fronts(points_N2), rng.permutation(len(points_N2))
    distances_N = compute_crowding(points_N2, ranks_N, ties_N=ties_N)
    order_N = np.lexsort((ties_N, -distances_N, ranks_N))
    return order_N, ranks_N[order_N], distances_N[order_N]


def read_rollouts(
    row: Mapping[str, Any], *, correctness_key: str, tool_calls_key: str, where: str
) -> tuple[list[float], list[float]]:
    """Correctness and tool calls of a question's rollouts; DataError unless both fields have one number for each."""
    correctness, calls = (_read_numbers(row, key=key, where=where) for key in (correctness_key, tool_calls_key))
    if len(correctness) != len(calls):
        raise DataError(
            f"{where} has {len(correctness)} values in {correctness_key} and {len(calls)} in {tool_calls_key}: both "
            "need one for each rollout"
        )
    return correctness, calls


def _read_numbers(row: Mapping[str, Any], *, key: str, where: str) -> list[float]:
    values = read_field(row, key, where=where, advice=". It needs one number for each rollout")
    is_numeric = isinstance(values, list | tuple) and all(
        isinstance(value, int | float) and np.isfinite(value) for value in values
    )
    if not is_numeric:
        raise DataError(f"{where}: {key} must be a list of finite numbers, one for each rollout, got {values!r:.80}")
    return [float(value) for value in values]


OUTCOME_KNOB, TOOL_KNOB = (f"{name} of task_selector.args" for name in ("outcome_key", "tool_keys"))
PositiveShare = Annotated[float, Field(gt=0, le=1)]
UNKNOWN = -1
"""Number of the state of a task without rollouts, beside 0 (all right or all wrong) and 1 (mixed outcomes)."""


class ParetoSelector:
    """Selects from the best `keep` of the tasks, by fronts of the spreads of correctness and of tool calls.

    Both are known from the last rollouts that the run made of a task, or from its row (`pass-rate --tool-key`). Kept
    tasks are visited in turn; those whose last rollouts were all right or all wrong when nothing else is left.

    keep           share of all tasks that is kept, at most the tasks with mixed outcomes
    explore        share of a batch for tasks without rollouts, while there are any
    correct_at     correctness from which a rollout counts as right
    outcome_key    metric of rollouts that is their correctness; None uses the reward
    tool_keys      metrics of rollouts whose sum is the number of tool calls
    correctness_key, tool_calls_key   fields of the rows with numbers of earlier rollouts; None knows none
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        keep: PositiveShare = 0.5,
        explore: Share = 0.25,
        correct_at: float = CORRECT_AT,
        outcome_key: str | None = None,
        tool_keys: Annotated[list[str], Field(min_length=1)] = ["tool_calls"],  # noqa: B006 - never modified
        correctness_key: str | None = None,
        tool_calls_key: str | None = None,
    ) -> None:
        if (correctness_key is None) != (tool_calls_key is None):
            raise ConfigError("selector 'pareto' needs both correctness_key and tool_calls_key, or neither")
        self.num_tasks = len(tasks)
        self.num_drawn = 0
        self._seed, self._keep, self._explore, self._correct_at = seed, keep, explore, correct_at
        self._outcome_key, self._tool_keys = outcome_key, tool_keys
        self._states_N = np.full(self.num_tasks, UNKNOWN, dtype=np.int64)
        self._spreads_N2: Floats = np.zeros((self.num_tasks, 2))
        self._num_selected_N: Indices = np.zeros(self.num_tasks, dtype=np.int64)
        self._choices: tuple[Choice, ...] = ()
        if correctness_key is not None and tool_calls_key is not None:
            keys = {"correctness_key": correctness_key, "tool_calls_key": tool_calls_key}
            numbers = [read_rollouts(task.row, **keys, where=f"task {task.task_id}") for task in tasks]
            known = [index for index, (correctness, _) in enumerate(numbers) if correctness]
            self._learn(known, [numbers[index][0] for index in known], [numbers[index][1] for index in known])

    def select(self, batch_size: int) -> list[int]:
        """The next tasks; a task repeats only when the batch exceeds the data set."""
        rng = np.random.default_rng((self._seed, self.num_drawn))
        kept_J, ranks_J, distances_J = self._find_kept(rng)
        choices: dict[int, Choice] = {}
        numbers = {
            int(index): describe_place(float(rank), float(distance))
            for index, rank, distance in zip(kept_J, ranks_J, distances_J, strict=True)
        }
        chosen: list[int] = []
        while len(chosen) < batch_size:
            left = min(batch_size - len(chosen), self.num_tasks)
            for index, reason in self._pick(left, kept_J, rng):
                chosen.append(index)
                spread = dict(zip(("std_correctness", "std_tool_calls"), self._spreads_N2[index].tolist(), strict=True))
                choices[index] = Choice(index=index, reason=reason, numbers=spread | numbers.get(index, {}))
        self._num_selected_N += np.bincount(chosen, minlength=self.num_tasks)
        self.num_drawn += batch_size
        self._choices = tuple(choices[index] for index in chosen)
        return chosen

    def _find_kept(self, rng: np.random.Generator) -> tuple[Indices, Indices, Floats]:
        """The best tasks with mixed outcomes, best first, with their fronts and crowding distances."""
        mixed_M = np.flatnonzero(self._states_N == 1)
        order, ranks, distances = sort_by_front(self._spreads_N2[mixed_M], rng=rng)
        size = min(len(mixed_M), math.ceil(round(self._keep * self.num_tasks, 6)))
        return mixed_M[order[:size]], ranks[:size], distances[:size]

    def _pick(self, size: int, kept_J: Indices, rng: np.random.Generator) -> Iterator[tuple[int, str]]:
        """`size` different tasks with the reason of each."""
        order_N = rng.permutation(self.num_tasks)
        unknown = order_N[self._states_N[order_N] == UNKNOWN]
        kept = kept_J[np.argsort(self._num_selected_N[kept_J], kind="stable")]
        others = order_N[(self._states_N[order_N] != UNKNOWN) & ~np.isin(order_N, kept_J)]
        others = others[np.lexsort((self._num_selected_N[others], -self._states_N[others]))]  # mixed outcomes first
        first, end = (math.floor(round(self._explore * each, 6)) for each in (self.num_drawn, self.num_drawn + size))
        num_unknown = min(len(unknown), end - first)  # small batches, too, explore in the end
        num_kept = min(len(kept), size - num_unknown)
        num_unknown = min(len(unknown), size - num_kept)
        parts = [
            (kept[:num_kept], "kept by its front"),
            (unknown[:num_unknown], "no rollouts yet"),
            (others[: size - num_kept - num_unknown], "nothing better left in the batch"),
        ]
        return ((int(index), reason) for indices, reason in parts for index in indices)

    def feedback(self, indices: Sequence[int], pass_rates: Sequence[float]) -> dict[str, float]:
        """Ignored beyond metrics: pass rates do not have the spread of tool calls, see `observe`."""
        num_mixed = int(np.count_nonzero(self._states_N == 1))
        return {
            "selector/num_tasks_known": float(np.count_nonzero(self._states_N != UNKNOWN)),
            "selector/num_tasks_mixed": float(num_mixed),
            "selector/std_correctness": float(self._spreads_N2[self._states_N == 1, 0].mean()) if num_mixed else 0.0,
            "selector/std_tool_calls": float(self._spreads_N2[self._states_N == 1, 1].mean()) if num_mixed else 0.0,
        }

    def observe(self, indices: Sequence[int], groups: Sequence[Group]) -> None:
        """Learn from the scored rollouts of tasks; a task without one stays as it is.

        The rollouts of a task that occurs several times are taken together.
        """
        seen: dict[int, list[Trajectory]] = {}
        for index, group in zip(indices, groups, strict=True):
            if group.scored:
                seen.setdefault(index, []).extend(group.scored)
        self._learn(
            list(seen),
            [[compute_outcome(run, self._outcome_key, knob=OUTCOME_KNOB) for run in runs] for runs in seen.values()],
            [
                [sum(read_metric(run, key, knob=TOOL_KNOB) for key in self._tool_keys) for run in runs]
                for runs in seen.values()
            ],
        )

    def _learn(
        self, indices: Sequence[int], correctness: Sequence[Sequence[float]], calls: Sequence[Sequence[float]]
    ) -> None:
        where = np.asarray(indices, dtype=np.int64)
        self._states_N[where] = find_mixed(correctness, correct_at=self._correct_at)
        self._spreads_N2[where] = np.stack([compute_spreads(correctness), compute_spreads(calls)], axis=1)

    def explain(self) -> Selection:
        """The choices of the last `select`; the histogram counts mixed tasks by 2 * std of correctness."""
        histogram = build_histogram(2 * self._spreads_N2[self._states_N == 1, 0])
        return Selection(choices=self._choices, summary=self.feedback((), ()), histogram=histogram)

    def state_dict(self) -> dict[str, Any]:
        return {
            "num_drawn": self.num_drawn,
            "states": self._states_N.tolist(),
            "spreads": self._spreads_N2.tolist(),
            "num_selected": self._num_selected_N.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["states"]) != self.num_tasks:
            raise ValueError(
                f"the selector's state has {len(state['states'])} tasks, the data set has {self.num_tasks}"
            )
        self.num_drawn = state["num_drawn"]
        self._states_N[:] = state["states"]
        self._spreads_N2[:] = np.asarray(state["spreads"]).reshape(self.num_tasks, 2)
        self._num_selected_N[:] = state["num_selected"]


def describe_place(rank: float, distance: float) -> dict[str, float]:
    """The place of a kept task; the ends of a front have no finite distance, and JSON no infinite number."""
    return {"front": rank} | ({"crowding_distance": distance} if math.isfinite(distance) else {"is_end_of_front": 1.0})
