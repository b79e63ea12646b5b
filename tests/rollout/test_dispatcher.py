"""Groups in flight over several steps, on a scripted engine: age, order, drops, and no task lost."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st

from conditions import until
from scripted_dispatch import BATCH_SIZE, GROUP_SIZE, NUM_TASKS, TOKENIZER, StepwiseEngine, build_plan, count, talk
from tunesmith.chat.renderer import Renderer
from tunesmith.cluster.work_thread import WorkThread
from tunesmith.errors import RolloutError
from tunesmith.experience.replay import compute_staleness
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import Dispatcher
from tunesmith.rollout.group import build_requests
from tunesmith.rollout.open_sessions import SESSIONS
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.watchdog import EventLoopWatchdog
from tunesmith.rollout.workers.local import LocalWorker
from tunesmith.tasks.selector import TaskFeed, build_sequential
from tunesmith.types import Distribution, Group, Sampling, Task, Trajectory, Turn, WorkflowOutput


def build_dispatcher(workflow, *, max_staleness: int, max_concurrency: int = 6, **options):
    engine = StepwiseEngine()
    service = ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=9))
    tasks = [Task(task_id=f"t/{i}", index=i, row={"number": i}) for i in range(NUM_TASKS)]
    feed = TaskFeed(tasks, build_sequential([[0.0]] * NUM_TASKS, seed=0))
    agent = Agent(workflow=workflow, timeout_s=60, cancel_grace_s=1)
    actors = Actors(engine=engine, model=service, service=service, agent=agent, max_concurrency=max_concurrency)
    worker = LocalWorker(actors, max_staleness=max_staleness)
    return Dispatcher([worker], feed, build_plan(max_staleness, **options)), engine, feed


def list_in_flight(dispatcher: Dispatcher) -> list[int]:
    """Indices of the tasks in flight."""
    return dispatcher.state_dict()["in_flight"]["tasks"]


async def take(
    dispatcher: Dispatcher, engine: StepwiseEngine, rng: random.Random, *, step: int, num_groups: int = BATCH_SIZE
) -> list[Group]:
    """One step: sample in random order until enough groups are complete."""
    taking = asyncio.ensure_future(dispatcher.collect(num_groups, step=step))
    while not taking.done():
        for _ in range(rng.randrange(1, 8)):
            await asyncio.sleep(0)
        engine.sample_one(rng)
    if taking.exception() is None:
        dispatcher.pause()
    return [each.group for each in await taking]


@hypothesis.given(max_staleness=st.integers(1, 3), seed=st.integers(0, 10**6))
@hypothesis.settings(max_examples=12)
def test_no_trained_token_is_too_old_and_no_task_is_lost(max_staleness, seed):
    async def run() -> None:
        rng, num_steps = random.Random(seed), 12
        dispatcher, engine, feed = build_dispatcher(talk, max_staleness=max_staleness, total_steps=num_steps)
        trained, num_dropped, is_stale = [], 0, False
        for step in range(1, num_steps + 1):
            taken = await take(dispatcher, engine, rng, step=step)
            assert len(taken) == BATCH_SIZE
            advantages = [[1.0 if run.reward is not None else None for run in group.trajectories] for group in taken]
            metrics = compute_staleness(taken, advantages, policy_version=step - 1)
            lags = [
                step - 1 - version
                for group in taken
                for run in group.scored
                for turn in run.turns
                for version in turn.policy_versions
            ]
            assert max(lags, default=0) <= max_staleness and metrics.get("staleness/max", 0) == max(lags, default=0)
            is_stale |= any(lags)
            counts = count(dispatcher)
            num_dropped += counts["staleness/num_dropped_groups"]
            assert dispatcher.num_in_flight == min(max_staleness, num_steps - step) * BATCH_SIZE
            trained += [group.task.index for group in taken]
            drawn = Counter(feed.selector.find_index(n) for n in range(feed.selector.num_drawn))
            assert Counter(trained + list_in_flight(dispatcher)) == drawn
        assert feed.give_feedback([None] * len(trained)) == {}, "the selector hears of each trained group once"
        assert is_stale and await dispatcher.close() == 0
        totals.append(num_dropped)

    totals: list[float] = []
    asyncio.run(run())


def test_old_groups_are_dropped_counted_and_run_again():
    """The first task of each batch is slow: its group has a token when others finish, and then gets no other."""
    release = []

    async def workflow(task, model):
        await model([{"role": "user", "content": "hi"}])
        if task["number"] == 0 and len(release) < GROUP_SIZE:
            release.append(asyncio.get_running_loop().create_future())
            await release[-1]
        return WorkflowOutput(reward=1.0)

    async def run() -> None:
        dispatcher, engine, _ = build_dispatcher(workflow, max_staleness=1)
        rng, seen, dropped = random.Random(0), [], []
        for step in range(1, 5):
            seen += [group.task.index for group in await take(dispatcher, engine, rng, step=step)]
            metrics = count(dispatcher)
            dropped.append(metrics["staleness/num_dropped_groups"])
            assert metrics["staleness/num_in_flight"] == BATCH_SIZE
        assert sum(dropped) == 1 and dropped[:2] == [0, 0], "it may be trained in steps 1 and 2"
        assert 0 in seen + list_in_flight(dispatcher)
        await dispatcher.close()
        assert all(each.cancelled() for each in release)

    asyncio.run(run())


class Oldest(random.Random):
    """Lets the request that has waited longest have the next token."""

    def randrange(self, start, stop=None, step=1):
        return 0 if stop is None else start


def test_groups_are_taken_in_the_order_of_their_start():
    """Other groups overtake the first one, which is slow; it is the first to be taken once it has finished."""
    release = asyncio.Event()

    async def workflow(task, model):
        await model([{"role": "user", "content": "hi"}])
        if task["number"] == 0:
            await release.wait()
        return WorkflowOutput(reward=1.0)

    async def run() -> None:
        dispatcher, engine, feed = build_dispatcher(workflow, max_staleness=3, max_concurrency=100)
        order = [feed.selector.find_index(number) for number in range(NUM_TASKS)]
        assert order[0] == 0
        first = await take(dispatcher, engine, Oldest(), step=1)
        assert first[0].task.index != 0
        assert count(dispatcher)["staleness/num_overtaking_groups"] == BATCH_SIZE
        release.set()
        for _ in range(50):  # its rollouts end although nothing is sampled
            await asyncio.sleep(0)
        taken = [group.task.index for group in await take(dispatcher, engine, Oldest(), step=2)]
        assert taken[0] == 0 and taken == sorted(taken, key=order.index)
        await dispatcher.close()

    asyncio.run(run())


def test_rollouts_in_flight_stay_within_the_concurrency_limit():
    running, most = 0, 0

    async def workflow(task, model):
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return await talk(task, model)
        finally:
            running -= 1

    async def run() -> None:
        dispatcher, engine, _ = build_dispatcher(workflow, max_staleness=3, max_concurrency=3)
        for step in range(1, 7):
            await take(dispatcher, engine, random.Random(step), step=step)
        await dispatcher.close()

    asyncio.run(run())
    assert (running, most) == (0, 3)


def start_evaluation(dispatcher, tasks) -> asyncio.Future:
    requests = build_requests(tasks, size=1, seed=1)
    return asyncio.ensure_future(dispatcher.evaluate(requests, policy_version=1))


def test_groups_in_flight_wait_while_others_are_evaluated():
    async def run() -> None:
        dispatcher, engine, feed = build_dispatcher(talk, max_staleness=1)
        rng = random.Random(0)
        await take(dispatcher, engine, rng, step=1)
        in_flight = set(engine.waiting)
        evaluating = start_evaluation(dispatcher, feed.tasks[:3])
        while not evaluating.done():
            await asyncio.sleep(0)
            engine.waiting = [each for each in engine.waiting if each not in in_flight] if not engine.is_paused else []
            engine.sample_one(rng)
        assert [group.task.index for group in await evaluating] == [0, 1, 2]
        assert not any(each.done() for each in in_flight), "they were set aside"
        engine.waiting = list(in_flight)
        assert len(await take(dispatcher, engine, rng, step=2)) == BATCH_SIZE
        await dispatcher.close()

    asyncio.run(run())


def test_an_evaluation_has_permits_while_groups_in_flight_keep_theirs():
    """Both rollouts that may run wait for a model that is set aside."""

    async def run() -> None:
        dispatcher, engine, feed = build_dispatcher(talk, max_staleness=1, max_concurrency=2)
        await take(dispatcher, engine, random.Random(0), step=1)
        evaluating = start_evaluation(dispatcher, feed.tasks[:2])
        while not evaluating.done():
            await asyncio.sleep(0)
            engine.sample_one(random.Random(0))
        assert len(await evaluating) == 2
        await dispatcher.close()

    asyncio.run(run())


def test_sessions_that_are_open_count_once_in_a_step_with_an_evaluation(monkeypatch):
    monkeypatch.setitem(SESSIONS, "opened", SESSIONS["closed"] + 3)

    async def run() -> dict[str, float]:
        dispatcher, engine, feed = build_dispatcher(talk, max_staleness=0)
        groups = await take(dispatcher, engine, random.Random(0), step=1)
        evaluating = start_evaluation(dispatcher, feed.tasks[:1])
        while not evaluating.done():
            await asyncio.sleep(0)
            engine.sample_one(random.Random(0))
        metrics = await dispatcher.compute_metrics(groups)
        await dispatcher.close()
        return metrics

    assert asyncio.run(run())["rollout/open_sessions"] == 3


def test_workflows_go_on_while_work_runs_in_a_thread():
    ticks = 0

    async def workflow(task, model):
        nonlocal ticks
        await model([{"role": "user", "content": "hi"}])
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async def run() -> None:
        dispatcher, engine, _ = build_dispatcher(workflow, max_staleness=1)
        thread = WorkThread()
        taking = asyncio.ensure_future(dispatcher.collect(1, step=1))
        while not ticks:
            await asyncio.sleep(0)
            engine.sample_one(random.Random(0))
        reached = threading.Event()

        def train() -> int:
            before, ends_at = ticks, time.monotonic() + 20
            while ticks < before + 3 and time.monotonic() < ends_at:
                reached.wait(0.005)
            return ticks - before

        assert await thread.run(train) >= 3
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 / 0)
        taking.cancel()
        await dispatcher.close()
        thread.close()

    asyncio.run(run())


def test_a_cancelled_run_waits_for_the_update():
    done = []

    async def run() -> None:
        thread = WorkThread()
        has_begun, may_end = threading.Event(), threading.Event()
        work = lambda: (has_begun.set(), may_end.wait(60), done.append(1))  # noqa: E731
        working = asyncio.ensure_future(thread.run(work))
        await until(has_begun.is_set)
        working.cancel()
        asyncio.get_running_loop().call_later(0.02, may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await working
        assert done == [1]
        thread.close()

    asyncio.run(run())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_error_of_ours_and_a_foreign_cancellation_stop_the_step(monkeypatch, max_staleness):
    async def run(workflow) -> None:
        dispatcher, engine, _ = build_dispatcher(workflow, max_staleness=max_staleness)
        try:
            await take(dispatcher, engine, random.Random(0), step=1)
        finally:
            await dispatcher.close()

    async def cancel_others(task, model):
        for other in asyncio.all_tasks():
            if "GroupRunner._run_rollout" in other.get_coro().__qualname__:
                other.cancel()
        return await talk(task, model)

    with pytest.raises(RolloutError, match="cancelled a rollout"):
        asyncio.run(run(cancel_others))
    monkeypatch.setattr("tunesmith.rollout.workers.group_runner.run_trajectory", None)
    with pytest.raises(TypeError, match="not callable"):
        asyncio.run(run(talk))


def test_time_while_paused_does_not_count_as_the_rollouts_own(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tunesmith.rollout.watchdog.time.monotonic", lambda: now[0])

    async def run() -> None:
        watchdog = EventLoopWatchdog(None, 5.0)
        watchdog.pause()
        now[0] += 7
        assert watchdog.blocked_s == 7
        watchdog.resume()
        now[0] += 3
        assert watchdog.blocked_s == 7

    asyncio.run(run())


def test_staleness_counts_trained_tokens_only():
    def build(versions, **options) -> Turn:
        size = len(versions)
        return Turn(
            prompt_ids=(1,), sampled_ids=(2,) * size, logprobs=(-1.0,) * size, policy_versions=versions,
            distribution=Distribution(), stop_reason="eos", **options,
        )  # fmt: skip

    task = Task(task_id="t", index=0, row={})
    runs = [(build((1, 1, 2)), build((3,))), (build((0,)),), (build((3,)), build((0, 1), is_trained=False))]
    group = Group(
        task=task,
        trajectories=tuple(Trajectory(task=task, run_index=i, turns=turns, reward=0.0) for i, turns in enumerate(runs)),
    )
    metrics = compute_staleness([group], [[1.0, None, -1.0]], policy_version=3)
    assert metrics == {
        "staleness/num_mixed_turns": 1, "staleness/mean": 1.0, "staleness/max": 2, "staleness/stale_frac": 0.6,
    }  # fmt: skip
    assert compute_staleness([group], [[None] * 3], policy_version=3) == {"staleness/num_mixed_turns": 0}
