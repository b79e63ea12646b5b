"""Steps on several ranks, here threads: the first has outlines of the others' groups until it collects them."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tunesmith.algorithms.algorithm import compute_group_advantages, has_advantage, resolve_algorithm
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import AlgorithmSection
from tunesmith.errors import RolloutError
from tunesmith.experience.batch import Batch, BatchSize
from tunesmith.experience.samples import build_samples
from tunesmith.rollout import actors as actors_module
from tunesmith.rollout.actors import Actors, RolloutProgress, run_tasks
from tunesmith.shared_step import check_step_failures, end_run, follow, take_groups, train_groups
from tunesmith.types import Distribution, Failure, Group, Task, Trajectory, Turn

GRPO = resolve_algorithm(AlgorithmSection(algorithm_type="grpo"))
NUM_RANKS = 3
TASKS = [Task(task_id=f"t/{index}", index=index, row={"number": index}) for index in range(6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRanks(Ranks):
    """Ranks that are threads of one process; objects are handed over as they are."""

    board: list[Any] = field(default_factory=lambda: [None] * NUM_RANKS)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(NUM_RANKS, timeout=30))

    def exchange(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        self.barrier.wait()
        seen = list(self.board)
        self.barrier.wait()
        return seen

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self.exchange(value)

    def gather_objects(self, value: Any) -> list[Any] | None:
        seen = self.exchange(value)
        return seen if self.is_first else None

    def broadcast_object(self, value: Any = None) -> Any:
        return self.exchange(value)[0]

    def scatter_objects(self, values: Any = None) -> Any:
        return self.exchange(values)[0][self.rank]


class Recorder:
    """In place of a trainer: keeps the samples of each step."""

    hidden_size, num_minibatches = 8, 1

    def __init__(self) -> None:
        self.samples: list[Any] = []

    def step(self, samples, *, policy_version, beside):
        self.samples = samples
        for piece in beside:
            piece()
        return {"train/loss": 0.5}

    def take_times(self) -> dict[str, float]:
        return {}


class Engine:
    policy_version = 4

    def resume(self, policy_version: int) -> None: ...
    def pause(self) -> None: ...
    def compute_stats(self) -> dict[str, float]:
        return {}


def build_group(task: Task, *, num_tokens: int = 5, is_failed: bool = False) -> Group:
    """Two rollouts of two turns each, and one that may have failed."""
    runs = []
    for run_index in range(3):
        first = Turn(
            prompt_ids=(1, task.index),
            sampled_ids=tuple(range(num_tokens)),
            logprobs=(-0.5 - run_index,) * num_tokens,
            policy_versions=(4,) * num_tokens,
            distribution=Distribution(),
            stop_reason="eos",
        )
        second = replace(first, prompt_ids=(*first.prompt_ids, *first.sampled_ids, 9))
        failure = Failure(where="judge", message="no verdict") if is_failed and run_index == 2 else None
        runs.append(
            Trajectory(
                task=task,
                run_index=run_index,
                turns=(first, second)[: 1 + run_index % 2],
                reward=None if failure is not None else float(run_index + task.index % 2),
                metrics={"steps": float(run_index)},
                failure=failure,
                response_text=f"answer {task.index}",
            )
        )
    return Group(task=task, trajectories=tuple(runs), baseline_reward=0.5)


def build_rank(rank: int, shared: ThreadRanks) -> Actors:
    service = SimpleNamespace(recorder=SimpleNamespace(compute_stats=dict))
    ranks = replace(shared, rank=rank, world_size=NUM_RANKS)
    return Actors(engine=Engine(), service=service, agent=None, max_concurrency=1, ranks=ranks)


def run_on_ranks(lead, monkeypatch, **group) -> tuple[Any, list[Recorder]]:
    """Run `lead(actors, trainer)` on the first rank while the others follow; its result, and all trainers."""

    async def run_own_tasks(actors, order, source, *_: Any) -> list[Group]:
        while await source.take() is not None:
            pass
        return [build_group(order.tasks[each], **(group if each == 1 else {})) for each in source.taken]

    monkeypatch.setattr(actors_module, "run_own_tasks", run_own_tasks)
    shared, trainers = ThreadRanks(), [Recorder() for _ in range(NUM_RANKS)]

    def run_first() -> Any:
        actors = build_rank(0, shared)
        try:
            return asyncio.run(lead(actors, trainers[0]))
        finally:
            end_run(actors.ranks, None)

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        others = [
            pool.submit(lambda rank=rank: asyncio.run(follow(build_rank(rank, shared), trainers[rank])))
            for rank in range(1, NUM_RANKS)
        ]
        result = pool.submit(run_first)
        for other in others:
            other.result(60)
        return result.result(60), trainers


async def make_step(actors: Actors, trainer: Recorder, *, has_tokens: bool) -> tuple[list[Group], Batch, dict, list]:
    """The groups before the update, the batch after it, the metrics of the update, and all saved trajectories."""
    batch, progress = Batch(size=BatchSize(num_groups=6, max_tasks=6)), RolloutProgress()
    groups = await run_tasks(actors, TASKS, group_size=3, seed=0, step=1, progress=progress, has_tokens=has_tokens)
    batch.add_round(groups, groups, {}, has_advantage=[has_advantage(GRPO, group) for group in groups])
    advantages, _ = compute_group_advantages(GRPO, batch.groups)
    take = partial(take_groups, actors, batch, progress)
    metrics = train_groups(actors, trainer, batch.groups, advantages, [], policy_version=4, beside=[take])
    return groups, batch, metrics, progress.finished


@pytest.mark.parametrize("num_tokens", [5, 60], ids=["balanced", "one long group"])
def test_groups_whose_outlines_were_sent_train_as_those_that_were_sent_whole(monkeypatch, num_tokens):
    """A group that is much longer than the others makes others move away from the rank that has run it."""
    results = {}
    for has_tokens in (False, True):
        (groups, batch, metrics, saved), trainers = run_on_ranks(
            lambda actors, trainer, has_tokens=has_tokens: make_step(actors, trainer, has_tokens=has_tokens),
            monkeypatch,
            num_tokens=num_tokens,
        )
        has_all = [all(turn.sampled_ids for run in group.trajectories for turn in run.turns) for group in groups]
        assert has_all == [has_tokens or index % NUM_RANKS == 0 for index in range(6)]
        whole = [build_group(task, **({"num_tokens": num_tokens} if task.index == 1 else {})) for task in TASKS]
        assert batch.collected == batch.groups == whole
        assert len(saved) == 12  # those of other ranks; its own are added as they finish
        assert (metrics["perf/collect_s"] > 0) == (not has_tokens)
        results[has_tokens] = ([trainer.samples for trainer in trainers], metrics["cluster/num_moved_groups"])
    assert results[False] == results[True]
    assert (results[True][1] > 0) == (num_tokens == 60)
    advantages, _ = compute_group_advantages(GRPO, whole)
    expected, _ = build_samples(whole, advantages)
    found = sorted((each for part in results[False][0] for each in part), key=lambda each: each.trajectory_index)
    assert found == expected


def test_rollouts_of_all_ranks_are_saved_if_too_many_failed(monkeypatch):
    async def lead(actors: Actors, trainer: Recorder) -> RolloutProgress:
        batch, progress = Batch(size=BatchSize(num_groups=6, max_tasks=6)), RolloutProgress()
        groups = await run_tasks(actors, TASKS, group_size=3, seed=0, step=1, progress=progress, has_tokens=False)
        batch.add_round(groups, groups, {}, has_advantage=[True] * 6)
        with pytest.raises(RolloutError, match="no verdict"):
            check_step_failures(actors, batch, progress, max_failure_rate=0.0)
        assert batch.collected == [build_group(task, is_failed=task.index == 1) for task in TASKS]
        return progress

    progress, _ = run_on_ranks(lead, monkeypatch, is_failed=True)
    saved = {(run.task.index, run.run_index): run for run in progress.finished}
    assert len(saved) == 12 and all(run.turns[0].sampled_ids for run in saved.values())
