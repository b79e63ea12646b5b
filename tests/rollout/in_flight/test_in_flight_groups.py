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

from chat_templates import QWEN25
from conditions import until
from fakes import FakeEngine, build_chat_tokenizer
from tunesmith.chat.renderer import Renderer
from tunesmith.errors import RolloutError
from tunesmith.experience.staleness import compute_staleness
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.in_flight.in_flight_groups import InFlightGroups
from tunesmith.rollout.in_flight.own_groups import InFlightLimits, OwnGroups
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.watchdog import EventLoopWatchdog
from tunesmith.tasks.selector import build_sequential
from tunesmith.tasks.task_feed import TaskFeed
from tunesmith.types import Completion, Distribution, Group, Sampling, Task, Trajectory, Turn, WorkflowOutput

TOKENIZER = build_chat_tokenizer(QWEN25)
GROUP_SIZE, BATCH_SIZE, NUM_TASKS = 2, 2, 7


class StepwiseEngine(FakeEngine):
    """Samples a token only in `sample_one`; each has the version of the weights at that moment."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, lambda prompt, sampling, order: [])
        self.waiting: list[asyncio.Future[None]] = []
        self.is_paused = True

    async def generate(self, prompt_ids, sampling, *, order=(), on_tokens=None) -> Completion:
        ids, versions = [], []
        for token_id in (20 + sampling.seed % 200, 30, TOKENIZER.eos_token_id):
            self.waiting.append(asyncio.get_running_loop().create_future())
            await self.waiting[-1]
            ids.append(token_id)
            versions.append(self.policy_version)
            on_tokens([token_id], [-1.0])
        return Completion(
            sampled_ids=tuple(ids), logprobs=(-1.0,) * 3, policy_versions=tuple(versions), stop_reason="eos"
        )

    def sample_one(self, rng: random.Random) -> None:
        """Sample the next token of one request, chosen at random."""
        self.waiting = [each for each in self.waiting if not each.done()]
        if self.waiting and not self.is_paused:
            self.waiting.pop(rng.randrange(len(self.waiting))).set_result(None)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self, policy_version, *, keeps_cache=False) -> None:
        self.policy_version, self.is_paused = policy_version, False

    def hold(self) -> None:
        self.pause()

    def release(self) -> None:
        self.pause()


def build_groups(workflow, *, max_staleness: int, total_steps: int = 100, max_concurrency: int = 6, feed=None):
    engine = StepwiseEngine()
    service = ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=9))
    tasks = [Task(task_id=f"t/{i}", index=i, row={"number": i}) for i in range(NUM_TASKS)]
    feed = feed or TaskFeed(tasks, build_sequential([[0.0]] * NUM_TASKS, seed=0))
    agent = Agent(workflow=workflow, timeout_s=60, cancel_grace_s=1)
    actors = Actors(engine=engine, service=service, agent=agent, max_concurrency=max_concurrency)
    limits = InFlightLimits(
        group_size=GROUP_SIZE, batch_size=BATCH_SIZE, max_staleness=max_staleness, total_steps=total_steps
    )
    return InFlightGroups(OwnGroups(actors, engine, limits, seed=0), feed, limits), engine, feed


async def talk(task, model):
    """Tasks make one to three calls; every fifth fails."""
    messages = [{"role": "user", "content": str(task["number"])}]
    for _ in range(1 + task["number"] % 3):
        reply = await model(messages)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
        messages += [{"role": "user", "content": "more"}]
    if task["number"] == 5:
        raise ValueError("five")
    return WorkflowOutput(reward=float(task["number"] % 2))


async def take(groups: InFlightGroups, engine: StepwiseEngine, rng: random.Random, *, step: int) -> list[Group]:
    """One step: sample in random order until enough groups are complete."""
    groups.resume(step - 1)
    taking = asyncio.ensure_future(groups.take(BATCH_SIZE, step=step))
    while not taking.done():
        for _ in range(rng.randrange(1, 8)):
            await asyncio.sleep(0)
        engine.sample_one(rng)
    groups.pause()
    return await taking


@hypothesis.given(max_staleness=st.integers(1, 3), seed=st.integers(0, 10**6))
@hypothesis.settings(max_examples=12)
def test_no_trained_token_is_too_old_and_no_task_is_lost(max_staleness, seed):
    async def run() -> None:
        rng, num_steps = random.Random(seed), 12
        groups, engine, feed = build_groups(talk, max_staleness=max_staleness, total_steps=num_steps)
        trained, num_dropped, is_stale = [], 0, False
        for step in range(1, num_steps + 1):
            taken = await take(groups, engine, rng, step=step)
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
            counts = groups.compute_metrics()
            num_dropped += counts["staleness/num_dropped_groups"]
            assert groups.num_in_flight == min(max_staleness, num_steps - step) * BATCH_SIZE
            trained += [group.task.index for group in taken]
            drawn = Counter(feed.selector._find_index(n) for n in range(feed.selector.num_drawn))
            assert Counter(trained + groups.state_dict()["tasks"]) == drawn
        assert feed.give_feedback([None] * len(trained)) == {}, "the selector hears of each trained group once"
        assert is_stale and await groups.close() == 0
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
        groups, engine, _ = build_groups(workflow, max_staleness=1)
        rng, seen, dropped = random.Random(0), [], []
        for step in range(1, 5):
            seen += [group.task.index for group in await take(groups, engine, rng, step=step)]
            metrics = groups.compute_metrics()
            dropped.append(metrics["staleness/num_dropped_groups"])
            assert metrics["staleness/num_in_flight"] == BATCH_SIZE
        assert sum(dropped) == 1 and dropped[:2] == [0, 0], "it may be trained in steps 1 and 2"
        assert 0 in seen + groups.state_dict()["tasks"]
        await groups.close()
        assert all(each.cancelled() for each in release)

    asyncio.run(run())


def test_groups_are_taken_in_the_order_of_their_start():
    async def run() -> list[int]:
        groups, engine, _ = build_groups(talk, max_staleness=2, max_concurrency=100)
        groups.resume(0)
        site = groups._site
        await site.open()
        site.start(groups._fill(6))
        while len(site.complete) < 4:
            await asyncio.sleep(0)
            engine.sample_one(random.Random(0))
        numbers = sorted(site.complete)[:2]
        taken = await groups.take(2, step=1)
        metrics = groups.compute_metrics()
        oldest = min((*site.running, *site.complete))
        assert metrics["staleness/num_overtaking_groups"] == sum(number > oldest for number in numbers)
        await groups.close()
        return [group.task.index for group in taken] == numbers

    assert asyncio.run(run())


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
        groups, engine, _ = build_groups(workflow, max_staleness=3, max_concurrency=3)
        for step in range(1, 7):
            await take(groups, engine, random.Random(step), step=step)
        await groups.close()

    asyncio.run(run())
    assert (running, most) == (0, 3)


def test_calls_wait_while_the_engine_is_held():
    async def run() -> None:
        groups, engine, _ = build_groups(talk, max_staleness=1)
        await take(groups, engine, random.Random(0), step=1)
        async with groups.held():
            engine.resume(1)
            for _ in range(200):
                await asyncio.sleep(0)
                engine.sample_one(random.Random(0))
            num_requests = len(engine.waiting)
            assert not groups._site._gate.is_set()
        groups.resume(1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len([each for each in engine.waiting if not each.done()]) > num_requests
        await groups.close()

    asyncio.run(run())


def test_workflows_go_on_while_work_runs_in_a_thread():
    ticks = 0

    async def workflow(task, model):
        nonlocal ticks
        await model([{"role": "user", "content": "hi"}])
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async def run() -> None:
        groups, engine, _ = build_groups(workflow, max_staleness=1)
        groups.resume(0)
        taking = asyncio.ensure_future(groups.take(1, step=1))
        while not ticks:
            await asyncio.sleep(0)
            engine.sample_one(random.Random(0))
        reached = threading.Event()

        def train() -> int:
            before, ends_at = ticks, time.monotonic() + 20
            while ticks < before + 3 and time.monotonic() < ends_at:
                reached.wait(0.005)
            return ticks - before

        assert await groups.run_beside(train) >= 3
        with pytest.raises(ZeroDivisionError):
            await groups.run_beside(lambda: 1 / 0)
        taking.cancel()
        await groups.close()

    asyncio.run(run())


def test_a_cancelled_run_waits_for_the_update():
    done = []

    async def run() -> None:
        groups, *_ = build_groups(talk, max_staleness=1)
        has_begun, may_end = threading.Event(), threading.Event()
        work = lambda: (has_begun.set(), may_end.wait(60), done.append(1))  # noqa: E731
        working = asyncio.ensure_future(groups.run_beside(work))
        await until(has_begun.is_set)
        working.cancel()
        asyncio.get_running_loop().call_later(0.02, may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await working
        assert done == [1]
        await groups.close()

    asyncio.run(run())


def test_an_error_of_ours_and_a_foreign_cancellation_stop_the_step(monkeypatch):
    async def run(workflow) -> None:
        groups, engine, _ = build_groups(workflow, max_staleness=1)
        try:
            await take(groups, engine, random.Random(0), step=1)
        finally:
            await groups.close()

    async def cancel_others(task, model):
        for other in asyncio.all_tasks():
            if "OwnGroups._run" in other.get_coro().__qualname__:
                other.cancel()
        return await talk(task, model)

    with pytest.raises(RolloutError, match="cancelled a rollout in flight"):
        asyncio.run(run(cancel_others))
    monkeypatch.setattr("tunesmith.rollout.in_flight.own_groups.run_trajectory", None)
    with pytest.raises(TypeError, match="not callable"):
        asyncio.run(run(talk))


def test_time_while_paused_does_not_count_as_the_rollouts_own(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tunesmith.rollout.watchdog.time.monotonic", lambda: now[0])

    async def run() -> None:
        watchdog = EventLoopWatchdog(asyncio.get_running_loop(), None, 5.0)
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
