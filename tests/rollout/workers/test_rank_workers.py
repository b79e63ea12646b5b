"""Workers on other ranks, which are coroutines of one event loop here, connected by real sockets."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from dataclasses import dataclass
from functools import partial

import hypothesis
import pytest
from hypothesis import strategies as st

from scripted_dispatch import BATCH_SIZE, GROUP_SIZE, NUM_TASKS, TOKENIZER, StepwiseEngine, build_plan, count, talk
from tunesmith.chat.renderer import Renderer
from tunesmith.cluster.links import Link
from tunesmith.cluster.work_thread import NoThread, WorkThread
from tunesmith.errors import RankError, RolloutError
from tunesmith.experience.batch import Batch, BatchSize
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import Dispatcher, DispatchPlan
from tunesmith.rollout.group import build_requests
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.workers.local import LocalWorker
from tunesmith.rollout.workers.rank import RankWorker, ServedWorker
from tunesmith.tasks.selector import TaskFeed, build_sequential
from tunesmith.types import Sampling, Task, WorkflowOutput

NUM_SAMPLERS = 2


def build_tasks():
    return [Task(task_id=f"t/{i}", index=i, row={"number": i}) for i in range(NUM_TASKS)]


class Unpicklable(str):
    def __reduce__(self):
        raise TypeError("cannot be sent")


@dataclass(frozen=True)
class End:
    """The last message."""


def build_local(workflow, engine, *, max_staleness: int) -> LocalWorker:
    service = ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=9))
    agent = Agent(workflow=workflow, timeout_s=60, cancel_grace_s=1)
    actors = Actors(engine=engine, model=service, service=service, agent=agent, max_concurrency=6)
    return LocalWorker(actors, max_staleness=max_staleness)


async def serve(worker: ServedWorker, link: Link) -> None:
    """Another rank: follow the first one until the end."""
    await link.open()
    await worker.open()
    try:
        while not isinstance(message := await worker.receive(), End):
            await worker.follow(message)
    finally:
        await worker.close()
        await link.close()


class RankRun:
    """The first rank of a run, and other ranks that sample; with `has_weights` they only sample."""

    def __init__(
        self,
        workflow,
        plan: DispatchPlan,
        *,
        has_weights: bool = True,
        sends_tokens: bool = True,
        timeout_s: float = 60,
    ) -> None:
        pairs = [socket.socketpair() for _ in range(NUM_SAMPLERS)]
        self.engines = [StepwiseEngine() for _ in pairs]
        self.num_sent = 0
        self.taken_weights: list[int] = []
        self.links = [Link(pair[0], timeout_s=timeout_s) for pair in pairs]
        options = {"num_weights": 9} if has_weights else {}
        workers = [
            RankWorker(link, rank, max_staleness=plan.max_staleness, **options)
            for rank, link in enumerate(self.links, start=1)
        ]
        self.feed = TaskFeed(build_tasks(), build_sequential([[0.0]] * NUM_TASKS, seed=0))
        self.thread = WorkThread() if plan.max_staleness else NoThread()
        send_weights = partial(self.thread.run, self._send) if has_weights else None
        self.dispatcher = Dispatcher(workers, self.feed, plan, send_weights=send_weights)
        self.served, self.sampling = [], []
        for engine, pair in zip(self.engines, pairs, strict=True):
            link = Link(pair[1], timeout_s=timeout_s)
            served = ServedWorker(
                build_local(workflow, engine, max_staleness=plan.max_staleness),
                link,
                sends_tokens=sends_tokens,
                take_weights=self._take if has_weights else None,
            )
            self.served.append(served)
            self.sampling.append(asyncio.create_task(serve(served, link)))

    def _send(self) -> None:
        self.num_sent += 1

    async def _take(self, num_weights: int) -> None:
        await self.thread.run(partial(self.taken_weights.append, num_weights))

    async def drive(self, work, rng: random.Random):
        """Wait for work of the first rank while the others sample in random order."""
        running = asyncio.ensure_future(work)
        while not running.done():
            for _ in range(rng.randrange(1, 8)):
                await asyncio.sleep(0)
            rng.choice(self.engines).sample_one(rng)
        return await running

    async def close(self) -> None:
        await self.dispatcher.close()
        for link in self.links:
            link.send(End())
            await link.close()
        await asyncio.gather(*self.sampling)
        self.thread.close()


@hypothesis.given(max_staleness=st.integers(1, 3), seed=st.integers(0, 10**6), is_balanced=st.booleans())
@hypothesis.settings(max_examples=10, deadline=None)
def test_no_trained_token_is_too_old_and_no_task_is_lost(max_staleness, seed, is_balanced):
    async def run() -> None:
        rng, num_steps = random.Random(seed), 10
        plan = build_plan(max_staleness, total_steps=num_steps, is_balanced=is_balanced, max_concurrency=6)
        ranks = RankRun(talk, plan)
        dispatcher, trained = ranks.dispatcher, []
        for step in range(1, num_steps + 1):
            taken = [each.group for each in await ranks.drive(dispatcher.collect(BATCH_SIZE, step=step), rng)]
            dispatcher.pause()
            lags = [
                step - 1 - version
                for group in taken
                for trajectory in group.scored
                for turn in trajectory.turns
                for version in turn.policy_versions
            ]
            assert len(taken) == BATCH_SIZE and all(0 <= lag <= max_staleness for lag in lags)
            in_flight = min(max_staleness, num_steps - step) * BATCH_SIZE
            assert dispatcher.num_in_flight == in_flight, "samplers run no further ahead"
            trained += [group.task.index for group in taken]
            drawn = Counter(ranks.feed.selector.find_index(n) for n in range(ranks.feed.selector.num_drawn))
            assert Counter(trained + dispatcher.state_dict()["in_flight"]["tasks"]) == drawn
            await ranks.drive(dispatcher.publish(step), rng)
            assert {engine.policy_version for engine in ranks.engines} == {step}
            metrics = await ranks.drive(dispatcher.compute_metrics(taken), rng)
            assert metrics["cluster/num_sampling_ranks"] == NUM_SAMPLERS
        assert ranks.num_sent == num_steps + 1, "before the first step, and after each"
        assert ranks.taken_weights == [9] * NUM_SAMPLERS * (num_steps + 1)
        await ranks.close()

    asyncio.run(run())


def test_groups_that_wait_too_long_are_dropped_and_run_again():
    """A finished group ages on the first rank, one that runs on its sampler."""
    release, blocked = asyncio.Event(), []

    async def workflow(task, model):
        await model([{"role": "user", "content": "hi"}])
        if task["number"] == 1 and not release.is_set():
            blocked.append(task)
            await release.wait()
        return WorkflowOutput(reward=1.0)

    async def run() -> None:
        ranks, rng = RankRun(workflow, build_plan(1)), random.Random(0)
        dispatcher = ranks.dispatcher
        (taken,) = await ranks.drive(dispatcher.collect(1, step=1), rng)
        assert taken.group.task.index in (0, 2)
        while count(dispatcher)["staleness/num_waiting_groups"] < 1 or len(blocked) < GROUP_SIZE:
            await ranks.drive(asyncio.sleep(0), rng)
        for version in (1, 2):
            await ranks.drive(dispatcher.publish(version), rng)
        release.set()
        dropped = count(dispatcher)["staleness/num_dropped_groups"]
        await ranks.drive(dispatcher.collect(BATCH_SIZE, step=3), rng)
        assert dropped + count(dispatcher)["staleness/num_dropped_groups"] == 2, "one of each"
        await ranks.close()

    asyncio.run(run())


def test_evaluations_run_on_the_samplers_and_do_not_count():
    async def run() -> None:
        ranks, rng, progress = RankRun(talk, build_plan(1)), random.Random(0), RolloutProgress()
        dispatcher, requests = ranks.dispatcher, build_requests(build_tasks()[:5], size=1, seed=1)
        first = await ranks.drive(dispatcher.evaluate(requests, progress=progress), rng)
        assert [group.task.index for group in first] == [0, 1, 2, 3, 4]
        assert progress.num_done == 5
        assert len(await ranks.drive(dispatcher.collect(BATCH_SIZE, step=1), rng)) == BATCH_SIZE
        again = await ranks.drive(dispatcher.evaluate(requests), rng)
        assert [[run.turns for run in g.trajectories] for g in again] == [
            [run.turns for run in g.trajectories] for g in first
        ]
        await ranks.drive(dispatcher.collect(BATCH_SIZE, step=2), rng)
        await ranks.close()

    asyncio.run(run())


def test_ranks_keep_the_tokens_of_groups_until_they_are_asked_for():
    """The first rank has rewards and costs; whole groups come when the run stops before its update."""

    async def run() -> None:
        ranks, rng = RankRun(talk, build_plan(0), has_weights=False, sends_tokens=False), random.Random(0)
        found = await ranks.drive(ranks.dispatcher.collect(6, step=1), rng)
        assert [each.rank for each in found] == [1, 2, 1, 2, 1, 2]
        assert all(not each.has_tokens and each.cost.num_tokens > 0 for each in found)
        groups = [each.group for each in found]
        kept = [ranks.served[each.rank - 1].kept[each.number] for each in found]
        for group, whole in zip(groups, kept, strict=True):
            pairs = list(zip(group.trajectories, whole.trajectories, strict=True))
            assert all((one.reward, one.failure) == (other.reward, other.failure) for one, other in pairs)
            assert all(len(one.turns) == len(other.turns) for one, other in pairs)
            assert not any(turn.sampled_ids for run in group.trajectories for turn in run.turns)
        batch, progress = Batch(size=BatchSize(num_groups=6, max_tasks=6)), RolloutProgress()
        batch.add_round(groups, groups, {}, has_advantage=[True] * 6)
        with pytest.raises(RolloutError, match="five"):
            await ranks.drive(ranks.dispatcher.check_failures(batch, found, progress, max_failure_rate=0.0), rng)
        assert batch.collected == batch.groups == kept
        assert len(progress.finished) == 6 * GROUP_SIZE
        await ranks.close()

    asyncio.run(run())


@pytest.mark.parametrize("is_balanced", [False, True])
def test_a_slow_worker_takes_fewer_groups_if_they_are_balanced(is_balanced):
    """Both begin with three groups of twelve; by plan each runs six."""

    async def run() -> list[int]:
        plan = build_plan(0, group_size=2, is_balanced=is_balanced, max_concurrency=6)
        ranks, rng = RankRun(talk, plan, has_weights=False), random.Random(0)
        slow, fast = ranks.engines
        collecting = asyncio.ensure_future(ranks.dispatcher.collect(12, step=1))
        number = 0
        while not collecting.done():
            number += 1
            await asyncio.sleep(0)
            fast.sample_one(rng)
            if number % 20 == 0:
                slow.sample_one(rng)
        found = await collecting
        assert sorted(each.number for each in found) == list(range(12))
        await ranks.close()
        return [sum(each.rank == rank for each in found) for rank in (1, 2)]

    slow, fast = asyncio.run(run())
    assert (slow >= 3 and fast >= 2 * slow) if is_balanced else (slow, fast) == (6, 6)


def test_an_error_on_another_rank_ends_it_and_the_first_rank(monkeypatch):
    monkeypatch.setattr("tunesmith.rollout.workers.group_runner.run_trajectory", None)

    async def run() -> None:
        ranks = RankRun(talk, build_plan(1))
        with pytest.raises(RankError, match="another rank has ended"):
            await ranks.dispatcher.collect(BATCH_SIZE, step=1)
        await ranks.dispatcher.close()
        for link in ranks.links:
            await link.close()
        ended = await asyncio.gather(*ranks.sampling, return_exceptions=True)
        assert any(isinstance(each, TypeError) for each in ended)
        ranks.thread.close()

    asyncio.run(run())


def test_a_group_that_cannot_be_sent_ends_both_ranks():
    """No rank waits for ever: the error of sending is raised on the rank, and the first one hears of its end."""

    async def workflow(task, model):
        await model([{"role": "user", "content": "hi"}])
        return WorkflowOutput(reward=1.0, response=Unpicklable("text"))

    async def run() -> None:
        ranks = RankRun(workflow, build_plan(1))
        with pytest.raises(RankError, match="another rank has ended"):
            await ranks.drive(ranks.dispatcher.collect(BATCH_SIZE, step=1), random.Random(0))
        await ranks.dispatcher.close()
        for link in ranks.links:
            await link.close()
        ended = await asyncio.gather(*ranks.sampling, return_exceptions=True)
        assert any("cannot be sent" in str(each) for each in ended)
        ranks.thread.close()

    asyncio.run(run())


def test_a_rank_that_hangs_ends_the_run_and_one_that_is_slow_does_not():
    async def run() -> None:
        near, far = socket.socketpair()
        link, hung = Link(near, timeout_s=0.3), Link(far, timeout_s=0.3)
        await link.open()
        with pytest.raises(RankError, match="within cluster.timeout_s=0.3: it hangs"):
            await link.receive()
        await hung.open()
        waiting = asyncio.ensure_future(link.receive())
        await asyncio.sleep(1)
        assert not waiting.done(), "its event loop runs"
        hung.send(End())
        assert await waiting == End()
        for each in (link, hung):
            await each.close()

    asyncio.run(run())


class Windows:
    """A worker that samples in windows, which the test ends."""

    def __init__(self, *finished: int) -> None:
        self.finished, self.window, self.num_windows, self.is_ended = list(finished), "idle", 0, False
        self.num_running, self.rank = 1, 0

    def begin_window(self) -> None:
        self.window, self.num_windows = "sampling", self.num_windows + 1

    def end_sampling(self) -> None:
        self.is_ended = True

    def end_window(self, window, *finished: int) -> None:
        self.window = window
        self.finished += finished
        self.on_change()

    def raise_error(self) -> None: ...
    async def open(self, progress, on_change) -> None:
        self.on_change = on_change

    async def close(self) -> None: ...
    def start(self, requests) -> None: ...
    def pause(self) -> None: ...

    async def set_version(self, policy_version):
        return []

    def take(self, numbers):
        return []


def test_ranks_stop_between_windows_only():
    """Three groups are needed; no decision is made while a rank is within a window."""

    async def run() -> None:
        workers = [Windows(), Windows(), Windows()]
        feed = TaskFeed(build_tasks(), build_sequential([[0.0]] * NUM_TASKS, seed=0))
        dispatcher = Dispatcher(workers, feed, build_plan(1))
        collecting = asyncio.ensure_future(dispatcher.collect(3, step=1))

        async def wait() -> list[int]:
            for _ in range(9):
                await asyncio.sleep(0)
            return [worker.num_windows for worker in workers]

        assert await wait() == [1, 1, 1]
        workers[0].end_window("waiting", 0, 3)
        workers[2].end_window("idle")
        assert await wait() == [1, 1, 1]
        workers[1].end_window("waiting")
        assert await wait() == [2, 2, 1], "the idle one has nothing to sample"
        workers[1].end_window("waiting", 1)
        assert await wait() == [2, 2, 1] and not collecting.done(), "the first is within a window"
        workers[0].end_window("idle")
        await wait()
        assert collecting.done() and all(worker.is_ended for worker in workers)

    asyncio.run(run())
