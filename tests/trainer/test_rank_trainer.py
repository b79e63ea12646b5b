"""Updates on several ranks, here threads: the first has references to the others' groups until the update."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from tunesmith.algorithms.algorithm import compute_group_advantages, has_advantage, resolve_algorithm
from tunesmith.cluster.links import Link
from tunesmith.cluster.ranks import Ranks
from tunesmith.config import AlgorithmSection
from tunesmith.experience.batch import Batch, BatchSize
from tunesmith.experience.finished_group import FinishedGroup, build_reference, measure_group
from tunesmith.experience.samples import build_samples
from tunesmith.trainer.rank_trainer import RankTrainer, StepGroups, split_experts
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

    def step(self, samples, *, policy_version, host_work):
        self.samples = samples
        for piece in host_work:
            piece()
        return {"train/loss": 0.5}

    def take_times(self) -> dict[str, float]:
        return {}


class Record:
    """Keeps what is saved."""

    def __init__(self) -> None:
        self.saved: list[Any] = []

    def __call__(self, groups, advantages) -> None:
        self.saved.append((groups, advantages))


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


def build_finished(index: int, group: Group, *, has_tokens: bool) -> FinishedGroup:
    """Group `index`, which rank `index` modulo 3 has run; the first rank has its own whole."""
    rank = index % NUM_RANKS
    if rank == 0:
        return FinishedGroup(number=index, group=group)
    known = group if has_tokens else replace(build_reference(group), task=group.task, baseline_reward=0.5)
    return FinishedGroup(number=index, group=known, has_tokens=has_tokens, rank=rank, cost=measure_group(group))


def make_step(whole: list[Group], *, has_tokens: bool) -> tuple[StepGroups, Record, dict[str, float], list[Recorder]]:
    """A step of six groups on three ranks."""
    shared, trainers, record = ThreadRanks(), [Recorder() for _ in range(NUM_RANKS)], Record()
    pairs = [socket.socketpair() for _ in range(NUM_RANKS - 1)]
    finished = [build_finished(index, group, has_tokens=has_tokens) for index, group in enumerate(whole)]
    batch = Batch(size=BatchSize(num_groups=6, max_tasks=6))
    groups = [each.group for each in finished]
    batch.add_round(groups, groups, {}, has_advantage=[has_advantage(GRPO, group) for group in groups])
    advantages, _ = compute_group_advantages(GRPO, batch.groups)
    step = StepGroups(batch=batch, finished=finished, advantages=advantages)

    async def lead() -> dict[str, float]:
        links = [Link(near, timeout_s=60) for near, _ in pairs]
        for link in links:
            await link.open()
        ranks = replace(shared, rank=0, world_size=NUM_RANKS)
        trainer = RankTrainer(trainer=trainers[0], ranks=ranks, links=links)
        times = {"perf/rollout_wait_s": 0.5, "perf/exchange_s": 0.0}
        metrics = await trainer.step(step, policy_version=4, times=times, record=record)
        for link in links:
            await link.close()
        return metrics

    async def follow(rank: int) -> dict[int, Group]:
        link = Link(pairs[rank - 1][1], timeout_s=60)
        await link.open()
        kept = {index: group for index, group in enumerate(whole) if index % NUM_RANKS == rank} | {99: whole[0]}
        ranks = replace(shared, rank=rank, world_size=NUM_RANKS)
        await RankTrainer(trainer=trainers[rank], ranks=ranks, kept=kept).follow(await link.receive())
        await link.close()
        return kept

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        others = [pool.submit(lambda rank=rank: asyncio.run(follow(rank))) for rank in range(1, NUM_RANKS)]
        metrics = pool.submit(lambda: asyncio.run(lead())).result(60)
        assert [list(other.result(60)) for other in others] == [[99]] * 2, "what no step has taken stays"
    return step, record, metrics, trainers


@pytest.mark.parametrize("num_tokens", [5, 60], ids=["balanced", "one long group"])
def test_groups_whose_references_were_sent_train_as_those_that_were_sent_whole(num_tokens):
    """A group that is much longer than the others makes others move away from the rank that has run it."""
    results = {}
    whole = [build_group(task, **({"num_tokens": num_tokens} if task.index == 1 else {})) for task in TASKS]
    for has_tokens in (False, True):
        step, record, metrics, trainers = make_step(whole, has_tokens=has_tokens)
        assert step.batch.collected == step.batch.groups == whole
        assert record.saved == [(whole, step.advantages)], "with the tokens of all ranks"
        assert (metrics["perf/collect_s"] > 0) == (not has_tokens)
        assert metrics["perf/rollout_wait_s"] == 0.5 and metrics["cluster/num_ranks"] == NUM_RANKS
        results[has_tokens] = ([trainer.samples for trainer in trainers], metrics["cluster/num_moved_groups"])
    assert results[False] == results[True]
    assert (results[True][1] > 0) == (num_tokens == 60)
    advantages, _ = compute_group_advantages(GRPO, whole)
    expected, _ = build_samples(whole, advantages)
    found = sorted((each for part in results[False][0] for each in part), key=lambda each: each.trajectory_index)
    assert found == expected


def test_routes_stay_on_the_ranks_that_train_with_them():
    routes = np.zeros((6, 1, 2), dtype=np.int8)
    groups = [build_group(task, num_tokens=60 if task.index == 1 else 5) for task in TASKS]
    whole = []
    for group in groups:
        runs = [
            replace(run, turns=tuple(replace(turn, routes=routes) for turn in run.turns)) for run in group.trajectories
        ]
        whole.append(replace(group, trajectories=tuple(runs)))
    _, record, metrics, trainers = make_step(whole, has_tokens=False)
    assert metrics["cluster/num_moved_groups"] > 0
    assert all(sample.routes is not None for trainer in trainers for sample in trainer.samples)
    ((saved, _),) = record.saved
    turns = {index: [turn for run in group.trajectories for turn in run.turns] for index, group in enumerate(saved)}
    assert [all(turn.routes is None for turn in turns[index]) for index in turns] == [False, True, True] * 2


def test_demonstrations_follow_the_groups_of_the_step():
    """Two groups of three rollouts; the third demonstration is trained by the first rank again."""
    experts, _ = build_samples(
        [
            replace(build_group(TASKS[index]), trajectories=build_group(TASKS[index]).trajectories[:1])
            for index in (2, 3, 4)
        ],
        [[1.0]] * 3,
    )
    groups = StepGroups(
        batch=Batch(size=BatchSize(num_groups=2, max_tasks=2)),
        finished=[],
        replayed=[build_group(TASKS[0]), build_group(TASKS[1])],
        advantages=[],
        experts=experts,
    )
    parts = [[(each.group_index, each.trajectory_index) for each in part] for part in split_experts(groups, 2)]
    assert parts == [[(2, 6), (4, 8)], [(3, 7)]]
    (whole,) = split_experts(groups, 1)
    assert [each.token_ids for each in whole] == [each.token_ids for each in experts]
