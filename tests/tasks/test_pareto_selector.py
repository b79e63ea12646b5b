"""The Pareto selector visits tasks whose rollouts differ in correctness and in tool calls, and explores the others."""

from __future__ import annotations

import json

import pytest

from tunesmith.config import SelectorSection
from tunesmith.errors import ConfigError, DataError
from tunesmith.tasks.pareto import ParetoSelector
from tunesmith.tasks.selector import Mixture, TaskFeed, build_sequential
from tunesmith.tasks.table import build_selector
from tunesmith.types import Failure, Group, Task, Trajectory

TASKS = [Task(task_id=f"t/{i}", index=i, row={"question": f"q{i}"}) for i in range(8)]
MIXED, EVEN = ([0, 1, 0, 1], [1, 3, 2, 1]), ([1, 1, 1, 1], [1, 2, 1, 1])


def make_group(index, rewards, calls):
    """Rollouts of a task; None is a failed one."""
    task = TASKS[index]
    return Group(
        task=task,
        trajectories=tuple(
            Trajectory(
                task=task,
                run_index=number,
                turns=(),
                reward=reward,
                metrics={} if reward is None else {"tool_calls": float(count)},
                failure=Failure(where="engine", message="lost") if reward is None else None,
            )
            for number, (reward, count) in enumerate(zip(rewards, calls, strict=True))
        ),
    )


def build(tasks=TASKS, **args):
    return build_selector(SelectorSection(selector_type="pareto", args=args), tasks, seed=0, load=None)


def test_unknown_tasks_are_explored_first_without_repetition():
    selector = build()
    assert sorted(selector.select(8)) == list(range(8))


def test_tasks_with_mixed_outcomes_are_visited_in_turn_with_a_share_of_unknown_ones():
    selector = build(keep=0.5, explore=0.25)
    selector.observe([0, 1, 2, 3], [make_group(0, *EVEN), *(make_group(i, *MIXED) for i in (1, 2, 3))])
    drawn = [selector.select(4) for _ in range(2)]
    for batch in drawn:
        assert set(batch) & {1, 2, 3} == {1, 2, 3} and len(set(batch) & {4, 5, 6, 7}) == 1
    reasons = {choice.index: choice.reason for choice in selector.explain().choices}
    assert {reasons[i] for i in (1, 2, 3)} == {"kept by its front"}


def test_the_best_fronts_are_kept_and_visited_least_often_first():
    spread = {i: ([0, 1, 0, 1], [0, i, 0, i]) for i in range(8)}
    selector = build(keep=0.5, explore=0)
    selector.observe(list(spread), [make_group(i, *numbers) for i, numbers in spread.items()])
    drawn = [selector.select(2) for _ in range(4)]
    assert drawn == [[7, 6], [5, 4], [7, 6], [5, 4]]
    assert selector.explain().choices[0].numbers["front"] == 2
    assert selector.explain().choices[0].numbers["std_tool_calls"] == 2.5


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 6])
def test_batches_of_any_size_explore_their_share(batch_size):
    selector = build(keep=1.0, explore=0.25)
    selector.observe(list(range(6)), [make_group(i, *MIXED) for i in range(6)])
    drawn = [index for _ in range(8) for index in selector.select(batch_size)]
    assert sum(index in (6, 7) for index in drawn) == len(drawn) * 0.25


def test_the_number_of_kept_tasks_is_not_raised_by_rounding():
    tasks = [Task(task_id=f"t/{i}", index=i, row={"c": [0, 1], "t": [i, 0]}) for i in range(100)]
    selector = build(tasks, correctness_key="c", tool_calls_key="t", keep=0.07, explore=0)
    assert 0.07 * 100 > 7
    assert {index for _ in range(14) for index in selector.select(1)} == set(range(93, 100))


def test_tasks_with_equal_outcomes_are_selected_when_nothing_else_is_left():
    """After those that are kept, mixed tasks of later fronts come first, however often they were visited."""
    spread = {i: ([0, 1, 0, 1], [0, i, 0, i]) for i in range(6)} | {6: EVEN, 7: EVEN}
    selector = build(keep=0.25, explore=0)
    selector.observe(list(spread), [make_group(i, *numbers) for i, numbers in spread.items()])
    for _ in range(4):
        assert set(selector.select(6)) == set(range(6))
    assert set(selector.select(7)) > set(range(6))


def test_choices_at_the_ends_of_a_front_are_json():
    """Their crowding distance is infinite, which JSON does not have."""
    spread = {1: ([0, 1, 1], [1, 2, 9]), 2: ([0, 1, 0, 1], [1, 1, 1, 2]), 3: ([0, 0, 1, 1], [1, 1, 1, 1])}
    selector = build(explore=0)
    selector.observe(list(spread), [make_group(i, *numbers) for i, numbers in spread.items()])
    selector.select(3)
    numbers = {choice.index: choice.numbers for choice in selector.explain().choices}
    json.dumps(list(numbers.values()), allow_nan=False)
    assert [numbers[index].get("is_end_of_front") for index in (1, 2, 3)] == [1.0, 1.0, None]


def test_a_task_leaves_when_its_rollouts_become_equal():
    selector = build(keep=1.0, explore=0)
    selector.observe(list(range(8)), [make_group(i, *MIXED) for i in range(8)])
    selector.observe([3], [make_group(3, *EVEN)])
    assert 3 not in selector.select(7)
    assert 3 in selector.select(8)
    assert selector.feedback([], [])["selector/num_tasks_mixed"] == 7


def test_failed_rollouts_are_not_counted():
    selector = build()
    selector.observe([0, 1], [make_group(0, [None, None], [0, 0]), make_group(1, [None, 1, 0], [0, 1, 1])])
    metrics = selector.feedback([], [])
    assert (metrics["selector/num_tasks_known"], metrics["selector/num_tasks_mixed"]) == (1, 1)
    assert metrics["selector/std_correctness"] == 0.5


def test_repeated_groups_of_a_task_are_taken_together():
    selector = build()
    selector.observe([2, 2], [make_group(2, [1, 1], [1, 1]), make_group(2, [0, 0], [1, 1])])
    assert selector.feedback([], [])["selector/num_tasks_mixed"] == 1


def test_rows_may_hold_earlier_rollouts():
    rows = [{"c": [0, 1], "t": [i, 0]} for i in range(4)] + [{"c": [1, 1], "t": [1, 1]}]
    tasks = [Task(task_id=f"t/{i}", index=i, row=row) for i, row in enumerate(rows)]
    assert build(tasks, correctness_key="c", tool_calls_key="t", keep=0.4, explore=0).select(2) == [3, 2]
    unknown = [*tasks, Task(task_id="t/5", index=5, row={"c": [], "t": []})]
    selector = build(unknown, correctness_key="c", tool_calls_key="t")
    assert selector.feedback([], [])["selector/num_tasks_known"] == 5
    with pytest.raises(
        DataError, match="task t/0 has no 'x'; its fields are c, t. It needs one number for each rollout"
    ):
        build(tasks, correctness_key="c", tool_calls_key="x")
    with pytest.raises(ConfigError, match="needs both correctness_key and tool_calls_key"):
        build(tasks, correctness_key="c")


def test_a_missing_metric_is_an_error():
    group = make_group(0, *MIXED)
    with pytest.raises(
        ConfigError, match=r"'searches' is not a metric of rollout 0 .*tool_calls.*tool_keys of task_selector"
    ):
        build(tool_keys=["tool_calls", "searches"]).observe([0], [group])
    with pytest.raises(ConfigError, match="'accuracy' is not a metric of rollout 0 .*outcome_key of task_selector"):
        build(outcome_key="accuracy").observe([0], [group])


def test_the_saved_state_repeats_the_selection():
    def prepare():
        selector = build(keep=0.5)
        selector.observe([1, 2, 3], [make_group(i, *MIXED) for i in (1, 2, 3)])
        selector.select(3)
        return selector

    one, other = prepare(), build(keep=0.5)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [one.select(3) for _ in range(4)] == [other.select(3) for _ in range(4)]
    with pytest.raises(ValueError, match="has 8 tasks, the data set has 4"):
        ParetoSelector(TASKS[:4], seed=0).load_state_dict(one.state_dict())


def test_rollouts_reach_the_selector_through_the_feed_and_a_mixture():
    selectors = {"plain": build_sequential([[]] * 2, seed=0), "own": ParetoSelector(TASKS[2:], seed=0)}
    mixture = Mixture(selectors, {"plain": 2, "own": 6}, weights={"plain": 1, "own": 1}, seed=0)
    feed = TaskFeed(TASKS, mixture)
    tasks = feed.select(4)
    metrics = feed.give_feedback([0.5] * 4, [make_group(task.index, *MIXED) for task in tasks])
    assert metrics["selector/num_tasks_mixed/own"] == 2
