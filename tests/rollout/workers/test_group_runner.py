"""Order of groups, counts of failures, and metrics computed by hand."""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.util
import logging
import sys
import threading
import time

import pytest

from chat_templates import QWEN25
from conditions import HANG_S, until
from fakes import FakeEngine, build_chat_tokenizer
from tunesmith.chat.renderer import Renderer
from tunesmith.errors import RolloutError
from tunesmith.rollout import watchdog
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.group import build_requests
from tunesmith.rollout.progress import RolloutProgress
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.statistics import check_failures, compute_rollout_metrics
from tunesmith.rollout.watchdog import EventLoopWatchdog
from tunesmith.rollout.workers.group_runner import GroupRunner
from tunesmith.types import Distribution, Failure, Group, Sampling, Task, Trajectory, Turn, WorkflowOutput

TOKENIZER = build_chat_tokenizer(QWEN25)
TASKS = [Task(task_id=f"train/{i}", index=i, row={"number": i}) for i in range(4)]


def build_service() -> ModelService:
    engine = FakeEngine(TOKENIZER, lambda prompt, sampling, order: [20 + sampling.seed % 200, TOKENIZER.eos_token_id])
    return ModelService(engine, Renderer(TOKENIZER), model_name="m", sampling=Sampling(max_tokens=50))


async def work(task, model):
    await model([{"role": "user", "content": str(task["number"])}])
    if task["number"] == 2:
        raise ValueError("two")
    return WorkflowOutput(reward=float(task["number"]))


async def collect(service, *, workflow=work, max_concurrency=100, progress=None, sampling=None):
    agent = Agent(workflow=workflow, timeout_s=60)
    requests = build_requests(TASKS, size=3, seed=7, step=1, sampling=sampling)
    actors = Actors(engine=None, model=service, agent=agent, max_concurrency=max_concurrency)
    async with GroupRunner(actors, progress=progress) as runner:
        return await runner.run_all(requests)


@pytest.mark.anyio
@pytest.mark.parametrize("max_concurrency", [1, 4, 100])
async def test_groups_are_in_task_order_and_independent_of_concurrency(max_concurrency):
    progress = RolloutProgress()
    groups = await collect(build_service(), max_concurrency=max_concurrency, progress=progress)
    assert [group.task for group in groups] == TASKS
    assert all([t.run_index for t in group.trajectories] == [0, 1, 2] for group in groups)
    assert [len(group.scored) for group in groups] == [3, 3, 0, 3]
    assert groups[2].trajectories[0].failure == Failure(where="workflow", message="ValueError: two")
    sampled = [t.turns[0].sampled_ids for group in groups for t in group.trajectories]
    reference = await collect(build_service())
    assert sampled == [t.turns[0].sampled_ids for group in reference for t in group.trajectories]
    assert len(set(sampled)) > 6
    assert progress.num_done == 12 and not progress.finished, "evaluations are not saved when they are aborted"


@pytest.mark.anyio
async def test_rollouts_start_in_order_and_within_the_concurrency_limit():
    running, most, started = 0, 0, []

    async def workflow(task, model):
        nonlocal running, most
        running += 1
        most = max(most, running)
        started.append(task["number"])
        try:
            return await work(task, model)
        finally:
            running -= 1

    service = build_service()
    await collect(service, workflow=workflow, max_concurrency=2)
    assert started == sorted(started)
    assert most == 2
    assert [order[:2] for *_, order in service.recorder.engine.requests][:3] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.anyio
async def test_sampling_can_be_overridden():
    service = build_service()
    await collect(service, sampling=Sampling(distribution=Distribution(temperature=0), max_tokens=3))
    assert {sampling.distribution.temperature for _, sampling, _ in service.recorder.engine.requests} == {0}


@pytest.mark.anyio
async def test_an_internal_error_cancels_all_runs():
    def show(text):
        raise AssertionError("ours")

    service = build_service()
    with pytest.raises(AssertionError, match="ours"):
        await collect(service, progress=RolloutProgress(show=show))
    assert service.recorder._sessions == {}


def make_trajectory(
    reward=None, *, where="workflow", message="boom", line=None, num_sampled=(), metrics=None
) -> Trajectory:
    turns = tuple(
        Turn(
            prompt_ids=(1, 2, 3), sampled_ids=(4,) * n, logprobs=(0.0,) * n, policy_versions=(0,) * n,
            distribution=Distribution(), stop_reason="eos" if n < 3 else "length",
        )
        for n in num_sampled
    )  # fmt: skip
    failure = None if reward is not None else Failure(where=where, message=message, line=line)
    return Trajectory(
        task=TASKS[0], run_index=0, turns=turns, reward=reward, failure=failure, metrics=metrics or {}, duration_s=2.0
    )


def test_metrics_by_hand():
    group = Group(
        task=TASKS[0],
        trajectories=(
            make_trajectory(1.0, num_sampled=(2, 4), metrics={"accuracy": 1.0}),
            make_trajectory(0.0, num_sampled=(1,), metrics={"accuracy": 0.0, "other": 5.0}),
            make_trajectory(num_sampled=(5,), metrics={"accuracy": 9.0}),
            make_trajectory(where="timeout"),
        ),
    )
    metrics = compute_rollout_metrics([group])
    expected = {
        "reward_mean": 0.5, "reward_std": 0.5, "reward_min": 0.0, "reward_max": 1.0,
        "num_trajectories": 4, "num_failed": 2, "num_failed_workflow": 1, "num_failed_timeout": 1,
        "num_failed_judge": 0, "num_failed_engine": 0, "num_turns": 4, "turns_mean": 1.0,
        "num_sampled_tokens": 12, "sampled_tokens_mean": 3.0, "sampled_tokens_max": 6,
        "sampled_tokens_per_turn_mean": 3.0, "num_prompt_tokens": 12, "prompt_tokens_per_turn_mean": 3.0,
        "num_stop_eos": 2, "num_stop_length": 2, "num_stop_context": 0, "num_truncated": 2,
        "sampled_tokens_per_turn_max": 5, "context_tokens_max": 8,
        "accuracy/mean": 0.5, "accuracy/max": 1.0, "accuracy/min": 0.0, "other/mean": 5.0,
    }  # fmt: skip
    assert {f"rollout/{name}": value for name, value in expected.items()}.items() <= metrics.items()
    assert metrics["perf/trajectory_s_mean"] == metrics["perf/trajectory_s_max"] == 2.0
    assert compute_rollout_metrics([])["rollout/num_trajectories"] == 0


def test_too_many_failures_stop_the_run_with_their_causes():
    failed = [make_trajectory(message=f"cause {i // 2}") for i in range(3)]
    groups = [Group(task=TASKS[0], trajectories=(*failed, make_trajectory(1.0)))]
    check_failures(groups, 0.75)
    with pytest.raises(RolloutError, match="3 of 4 rollouts failed, more than max_failure_rate=0.5") as caught:
        check_failures(groups, 0.5)
    assert str(caught.value).splitlines()[1:] == ["  2 x workflow: cause 0", "  1 x workflow: cause 1"]
    check_failures([], 0.0)


def test_causes_are_grouped_by_kind_with_the_first_message():
    line = "agent.py:3 in solve"
    failed = [make_trajectory(message=f"ValueError: no {i}\n more", line=line) for i in range(3)]
    failed += [make_trajectory(message="TypeError: x", line=line), make_trajectory(where="judge", message="boom")]
    assert list_causes(run.failure for run in failed) == [
        "3 x workflow: ValueError: no 0 more (agent.py:3 in solve)",
        "1 x workflow: TypeError: x (agent.py:3 in solve)",
        "1 x judge: boom",
    ]


@pytest.mark.anyio
async def test_repeated_blocking_of_the_event_loop_aborts_the_phase(caplog, monkeypatch):
    has_looked, find = threading.Event(), watchdog.find_running_line

    def find_running_line(frame, **within):
        has_looked.set()
        return find(frame, **within)

    def block_here():
        has_looked.clear()
        time.sleep(0.5)
        assert has_looked.wait(HANG_S)  # a busy machine may not have run the watchdog's thread meanwhile
        time.sleep(0.1)

    async def workflow(task, model):
        await work(task, model)
        block_here()

    monkeypatch.setattr(watchdog, "find_running_line", find_running_line)
    agent = Agent(workflow=workflow, timeout_s=0.2, cancel_grace_s=0.05)
    with pytest.raises(RolloutError, match=r"3 rollouts blocked the event loop past rollout.timeout_s=0.2.*block_here"):
        requests = build_requests(TASKS[:1], size=8, seed=7, step=1)
        actors = Actors(engine=None, model=build_service(), agent=agent, max_concurrency=8)
        async with GroupRunner(actors) as runner:
            await runner.run_all(requests)
    warnings = [record.getMessage().splitlines()[0] for record in caplog.records]
    assert any("test_group_runner.py" in each for each in warnings), warnings


@pytest.mark.anyio
async def test_the_watchdog_logs_the_blocking_line(caplog):
    has_warned = threading.Event()

    def block_here():
        assert has_warned.wait(HANG_S)

    class Warned(logging.Handler):
        def emit(self, record):
            has_warned.set()

    # after caplog's handler, so that the record is there once the loop goes on
    root, warned = logging.getLogger(), Warned()
    root.addHandler(warned)
    try:
        with EventLoopWatchdog(logging.getLogger("test_watchdog"), 0.1).watching():
            await asyncio.sleep(0.2)
            assert not caplog.records
            block_here()
    finally:
        root.removeHandler(warned)
    assert len(caplog.records) == 1
    assert "block_here" in caplog.text


@pytest.mark.anyio
async def test_the_blocking_line_is_named_although_the_loop_runs_on_while_its_source_is_read(caplog):
    is_read, has_run_on = threading.Event(), threading.Event()

    source = "def block():\n    wait()\n"

    class SlowSource:
        def get_source(self, name):
            is_read.set()
            assert has_run_on.wait(HANG_S)
            return source

    names = {"__name__": "slow_source", "__loader__": SlowSource(), "wait": is_read.wait}
    exec(compile(source, "/slow/agent.py", "exec"), names)
    with EventLoopWatchdog(logging.getLogger("test_watchdog"), 0.1).watching():
        names["block"]()
        await asyncio.sleep(0)
        has_run_on.set()
        await asyncio.sleep(0.2)
    assert "by a synchronous call at /slow/agent.py:2 in block;" in caplog.text


@pytest.mark.anyio
async def test_the_watchdog_does_not_blame_the_code_that_started_the_event_loop(caplog):
    """This file is below the event loop in the stack, but the blocking call is not its own."""
    with EventLoopWatchdog(logging.getLogger("test_watchdog"), 0.1).watching():
        asyncio.get_running_loop().call_soon(time.sleep, 0.4)
        await asyncio.sleep(0.5)
    assert [each.getMessage().splitlines()[0].split(";")[0] for each in caplog.records] == [
        "the event loop has been blocked for more than 0.1 s by a synchronous call at a place without user code"
    ]


@pytest.mark.anyio
async def test_the_watchdog_does_not_report_many_short_events(caplog):
    """One pass over the calls of hundreds of rollouts may take long, but none of them blocks."""
    with EventLoopWatchdog(logging.getLogger("test_watchdog"), 0.5).watching():
        for _ in range(300):
            asyncio.get_running_loop().call_soon(time.sleep, 0.004)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not caplog.records


class SlowModule(importlib.abc.InspectLoader):
    """A module that is not user code and takes long to import."""

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "slow_module" else None

    def get_source(self, fullname):
        return "import time\ntime.sleep(0.4)"


@pytest.mark.anyio
async def test_the_watchdog_does_not_report_imports_of_the_program(caplog, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [SlowModule(), *sys.meta_path])
    with EventLoopWatchdog(logging.getLogger("test_watchdog"), 0.1).watching():
        asyncio.get_running_loop().call_soon(importlib.import_module, "slow_module")
        await asyncio.sleep(0.5)
    assert sys.modules.pop("slow_module")
    assert not caplog.records


@pytest.mark.anyio
async def test_a_runner_whose_end_is_cancelled_leaves_no_watchdog():
    is_cleaning = asyncio.Event()

    async def stubborn(task, model):
        try:
            await asyncio.sleep(60)
        finally:
            is_cleaning.set()
            await asyncio.sleep(0.2)

    async def start_and_end() -> None:
        agent = Agent(workflow=stubborn, timeout_s=60)
        actors = Actors(engine=None, model=build_service(), agent=agent, max_concurrency=1)
        async with GroupRunner(actors) as runner:
            runner.start(build_requests(TASKS[:1], size=1, seed=0))
            await asyncio.sleep(0.01)

    before = set(threading.enumerate())
    running = asyncio.create_task(start_and_end())
    await is_cleaning.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: set(threading.enumerate()) <= before)
