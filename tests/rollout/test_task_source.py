"""Tasks by plan and on demand: every task is taken once, and a rank whose rollouts take long takes fewer."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from tunesmith.config.rollout.branching import BranchingSection, check_branching
from tunesmith.rollout.task_source import PlannedTasks, TasksOnDemand, take_all


def build_sources(*, num_tasks: int, num_ranks: int) -> list[TasksOnDemand]:
    """One for each rank, with a counter that they share."""
    numbers = count()
    return [TasksOnDemand(lambda: next(numbers), num_tasks=num_tasks, num_ranks=num_ranks) for _ in range(num_ranks)]


async def run_tasks(source, *, num_slots: int, num_turns: int) -> None:
    """As a rank: at most `num_slots` tasks at once, each of which takes that many turns of the event loop."""
    slots = asyncio.Semaphore(num_slots)

    async def run() -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        slots.release()
        source.end_group()

    running = []
    await slots.acquire()
    while await source.take() is not None:
        running.append(asyncio.create_task(run()))
        await slots.acquire()
    await asyncio.gather(*running)


async def run_ranks(sources, turns: list[int], *, num_slots: int) -> list[int]:
    """Number of tasks that each rank has run."""
    pairs = zip(sources, turns, strict=True)
    await asyncio.gather(*(run_tasks(source, num_slots=num_slots, num_turns=each) for source, each in pairs))
    return [len(source.taken) for source in sources]


def test_a_plan_hands_out_its_positions_in_order():
    assert asyncio.run(take_all(PlannedTasks(range(1, 8, 3)))) == [1, 4, 7]


def test_every_task_is_taken_once():
    sources = build_sources(num_tasks=20, num_ranks=3)
    asyncio.run(run_ranks(sources, [1, 4, 9], num_slots=2))
    assert sorted(position for source in sources for position in source.taken) == list(range(20))


def test_a_slow_rank_takes_fewer_tasks():
    fast, slow = asyncio.run(run_ranks(build_sources(num_tasks=24, num_ranks=2), [2, 20], num_slots=2))
    assert slow >= 2 and fast >= 3 * slow


def test_a_rank_with_room_for_all_tasks_leaves_the_others_their_share():
    async def run() -> list[int]:
        sources = build_sources(num_tasks=8, num_ranks=2)
        early = asyncio.create_task(run_tasks(sources[0], num_slots=99, num_turns=50))
        for _ in range(10):
            await asyncio.sleep(0)
        late = asyncio.create_task(run_tasks(sources[1], num_slots=99, num_turns=1))
        await asyncio.gather(early, late)
        return [len(source.taken) for source in sources]

    assert asyncio.run(run()) == [4, 4]


def test_trees_are_not_handed_out_on_demand():
    with pytest.raises(ValueError, match=r"rollout\.assignment=balanced with rollout\.branching: set rollout"):
        check_branching(BranchingSection(), "balanced", group_size=4, temperature=1.0)
    check_branching(None, "balanced", group_size=4, temperature=1.0)
