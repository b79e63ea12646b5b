"""Groups in flight on other ranks, which are coroutines of one event loop here, connected by real sockets."""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st
from test_in_flight_groups import BATCH_SIZE, GROUP_SIZE, NUM_TASKS, TOKENIZER, StepwiseEngine, talk

from tunesmith.chat.renderer import Renderer
from tunesmith.cluster.links import Link, Links
from tunesmith.cluster.ranks import Ranks
from tunesmith.errors import RankError
from tunesmith.rollout.actors import Actors, RolloutProgress
from tunesmith.rollout.in_flight.in_flight_groups import InFlightGroups
from tunesmith.rollout.in_flight.own_groups import InFlightLimits, OwnGroups
from tunesmith.rollout.in_flight.rank_sampling import SamplingPhase, SamplingReport
from tunesmith.rollout.in_flight.remote_groups import RemoteGroups
from tunesmith.rollout.in_flight.sampling_rank import SamplingRank
from tunesmith.rollout.rank_shares import RankLedger, RolloutOrder
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.tasks.selector import build_sequential
from tunesmith.tasks.task_feed import TaskFeed
from tunesmith.types import Sampling, Task, WorkflowOutput

NUM_SAMPLERS = 2


def build_tasks():
    return [Task(task_id=f"t/{i}", index=i, row={"number": i}) for i in range(NUM_TASKS)]


class SplitRun:
    """The first rank of a run and its samplers."""

    def __init__(self, workflow, limits: InFlightLimits, *, is_balanced: bool = False, timeout_s: float = 60) -> None:
        pairs = [socket.socketpair() for _ in range(NUM_SAMPLERS)]
        self.engines = [StepwiseEngine() for _ in pairs]
        self.num_sent = 0
        self.ledger = RankLedger()
        links = Links(by_rank={rank: Link(pair[0]) for rank, pair in enumerate(pairs, start=1)})
        self.site = RemoteGroups(
            links, self.ledger, send_weights=self._send, num_elements=9, max_staleness=limits.max_staleness,
            is_balanced=is_balanced, timeout_s=timeout_s,
        )  # fmt: skip
        self.feed = TaskFeed(build_tasks(), build_sequential([[0.0]] * NUM_TASKS, seed=0))
        self.groups = InFlightGroups(self.site, self.feed, limits)
        self.taken_weights: list[int] = []
        samplers = [self._build_sampler(workflow, limits, index, Link(pair[1])) for index, pair in enumerate(pairs)]
        self.sampling = [asyncio.create_task(each.run()) for each in samplers]

    def _build_sampler(self, workflow, limits, index, link) -> SamplingRank:
        engine = self.engines[index]
        service = ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=9))
        agent = Agent(workflow=workflow, timeout_s=60, cancel_grace_s=1)
        ranks = Ranks(rank=index, world_size=NUM_SAMPLERS)
        actors = Actors(engine=engine, service=service, agent=agent, max_concurrency=6, ranks=ranks)
        return SamplingRank(
            actors,
            OwnGroups(actors, engine, limits, seed=0),
            link,
            take_weights=self.taken_weights.append,
            timeout_s=60,
        )

    def _send(self) -> None:
        self.num_sent += 1

    async def drive(self, work, rng: random.Random):
        """Wait for work of the first rank while samplers sample in random order."""
        running = asyncio.ensure_future(work)
        while not running.done():
            for _ in range(rng.randrange(1, 8)):
                await asyncio.sleep(0)
            rng.choice(self.engines).sample_one(rng)
        return await running

    async def close(self) -> None:
        await self.groups.close()
        await asyncio.gather(*self.sampling)


def build_limits(max_staleness: int, *, total_steps: int = 100) -> InFlightLimits:
    return InFlightLimits(
        group_size=GROUP_SIZE, batch_size=BATCH_SIZE, max_staleness=max_staleness, total_steps=total_steps
    )


@hypothesis.given(max_staleness=st.integers(1, 3), seed=st.integers(0, 10**6), is_balanced=st.booleans())
@hypothesis.settings(max_examples=10, deadline=None)
def test_no_trained_token_is_too_old_and_no_task_is_lost(max_staleness, seed, is_balanced):
    async def run() -> None:
        rng, num_steps = random.Random(seed), 10
        split = SplitRun(talk, build_limits(max_staleness, total_steps=num_steps), is_balanced=is_balanced)
        groups, trained, dropped = split.groups, [], 0.0
        for step in range(1, num_steps + 1):
            groups.resume(step - 1)
            taken = await split.drive(groups.take(BATCH_SIZE, step=step), rng)
            groups.pause()
            lags = [
                step - 1 - version
                for group in taken
                for trajectory in group.scored
                for turn in trajectory.turns
                for version in turn.policy_versions
            ]
            assert len(taken) == BATCH_SIZE and all(0 <= lag <= max_staleness for lag in lags)
            in_flight = min(max_staleness, num_steps - step) * BATCH_SIZE
            assert groups.num_in_flight == in_flight, "samplers run no further ahead"
            trained += [group.task.index for group in taken]
            drawn = Counter(split.feed.selector._find_index(n) for n in range(split.feed.selector.num_drawn))
            assert Counter(trained + groups.state_dict()["tasks"]) == drawn
            assert await split.drive(groups.train(lambda: "metrics", policy_version=step), rng) == "metrics"
            assert {engine.policy_version for engine in split.engines} == {step}
            metrics = groups.compute_metrics()
            dropped += metrics["staleness/num_dropped_groups"]
            assert metrics["cluster/num_sampling_ranks"] == NUM_SAMPLERS
        assert split.num_sent == num_steps + 1, "before the first step, and after each"
        assert split.taken_weights == [9] * NUM_SAMPLERS * (num_steps + 1)
        await split.close()

    asyncio.run(run())


def test_groups_that_wait_too_long_are_dropped_and_run_again():
    """A complete group ages on the first rank, one that runs on its sampler."""
    release, blocked = asyncio.Event(), []

    async def workflow(task, model):
        await model([{"role": "user", "content": "hi"}])
        if task["number"] == 1 and not release.is_set():
            blocked.append(task)
            await release.wait()
        return WorkflowOutput(reward=1.0)

    async def run() -> None:
        split, rng = SplitRun(workflow, build_limits(1)), random.Random(0)
        groups = split.groups
        groups.resume(0)
        taken = await split.drive(groups.take(1, step=1), rng)
        assert taken[0].task.index in (0, 2)
        while split.site.num_waiting < 1 or len(blocked) < GROUP_SIZE:
            await split.drive(asyncio.sleep(0), rng)
        for version in (1, 2):
            await split.drive(groups.train(lambda: None, policy_version=version), rng)
        release.set()
        groups.resume(2)
        await split.drive(groups.take(BATCH_SIZE, step=3), rng)
        assert groups.compute_metrics()["staleness/num_dropped_groups"] == 2, "one of each"
        await split.close()

    asyncio.run(run())


def test_other_rounds_run_on_the_samplers_and_do_not_count():
    async def run() -> None:
        split, rng = SplitRun(talk, build_limits(1)), random.Random(0)
        order = RolloutOrder(
            tasks=build_tasks()[:5], group_size=1, seed=1, step=0, sampling=None, baseline_sampling=None,
            policy_version=0, number=0,
        )  # fmt: skip
        progress = RolloutProgress()
        first = await split.drive(split.site.run_round(order, progress), rng)
        assert [group.task.index for group in first] == list(range(5)) == [0, 1, 2, 3, 4]
        assert len(progress.finished) == 5
        split.groups.resume(0)
        assert len(await split.drive(split.groups.take(BATCH_SIZE, step=1), rng)) == BATCH_SIZE
        again = await split.drive(split.site.run_round(order, RolloutProgress()), rng)
        assert [[run.turns for run in g.trajectories] for g in again] == [
            [run.turns for run in g.trajectories] for g in first
        ]
        split.groups.resume(1)
        await split.drive(split.groups.take(BATCH_SIZE, step=2), rng)
        await split.close()

    asyncio.run(run())


def test_an_error_on_a_sampler_ends_it_and_the_first_rank(monkeypatch):
    monkeypatch.setattr("tunesmith.rollout.in_flight.own_groups.run_trajectory", None)

    async def run() -> None:
        split = SplitRun(talk, build_limits(1))
        split.groups.resume(0)
        with pytest.raises(RankError, match="another rank has ended"):
            await split.groups.take(BATCH_SIZE, step=1)
        await split.groups.close()
        ended = await asyncio.gather(*split.sampling, return_exceptions=True)
        assert any(isinstance(each, TypeError) for each in ended)

    asyncio.run(run())


def test_a_sampler_that_hangs_ends_the_run():
    """Nothing is sampled here, so no group is ever complete."""

    async def run() -> None:
        split = SplitRun(talk, build_limits(1), timeout_s=0.3)
        split.groups.resume(0)
        with pytest.raises(RankError, match="within cluster.timeout_s=0.3"):
            await split.groups.take(BATCH_SIZE, step=1)
        await split.close()

    asyncio.run(run())


def report(state, *complete, phase=0) -> SamplingReport:
    return SamplingReport(phase=phase, state=state, complete=complete)


def test_ranks_stop_between_windows_only():
    phase = SamplingPhase(number=0, num_needed=3, complete={0: (), 1: (), 2: ()}, has_windows=True)
    phase.add(0, report("waiting", 0, 3))
    phase.add(2, report("idle"))
    assert not phase.has_ended and phase.begin_windows() == []
    phase.add(1, report("waiting"))
    assert not phase.has_ended and phase.begin_windows() == [0, 1]
    phase.add(1, report("waiting", 1))
    assert not phase.has_ended and phase.begin_windows() == [], "rank 0 is within a window"
    phase.add(0, report("idle", 0, 3))
    assert phase.has_ended


def test_without_windows_ranks_stop_at_once():
    phase = SamplingPhase(number=0, num_needed=2, complete={0: (4,), 1: ()}, has_windows=False)
    phase.add(1, report("sampling"))
    assert not phase.has_ended and phase.begin_windows() == []
    phase.add(1, report("sampling", 5))
    assert phase.has_ended
