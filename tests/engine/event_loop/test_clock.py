"""The engine steps when every coroutine waits, no caller waits forever, and lockstep runs are reproducible."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from engines import GREEDY, build_engine, build_prompts, generate_all
from tunesmith.config import RolloutSection
from tunesmith.engine.event_loop import clock
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.errors import EngineError
from tunesmith.garbage import are_objects_frozen
from tunesmith.types import Completion, Sampling

MODES: dict[str, Callable] = {"lockstep": run_lockstep, "lockstep on a plain loop": asyncio.run}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Callable:
    return MODES[request.param]


def test_every_clock_gives_the_same_tokens(mode: Callable) -> None:
    prompts = build_prompts(5, 30, 12, 12)
    expected = generate_all(build_engine(), prompts, Sampling(max_tokens=15, seed=0))
    engine = build_engine()

    async def run() -> list[Completion]:
        samplings = [Sampling(max_tokens=15, seed=index) for index in range(len(prompts))]
        return await asyncio.gather(*map(engine.generate, prompts, samplings))

    assert [c.sampled_ids for c in mode(run())] == [c.sampled_ids for c in expected]
    assert [c.sampled_ids for c in mode(run())] == [c.sampled_ids for c in expected]


def test_tokens_arrive_in_order_before_the_completion(mode: Callable) -> None:
    engine = build_engine()
    tokens: list[tuple[int, float]] = []

    def take(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        tokens.extend(zip(token_ids, logprobs, strict=True))

    completion = mode(engine.generate([1, 2], Sampling(max_tokens=9), on_tokens=take))
    assert tokens == list(zip(completion.sampled_ids, completion.logprobs, strict=True))


def test_cancelling_a_task_frees_its_blocks_and_other_requests_continue(mode: Callable) -> None:
    engine = build_engine()

    async def run() -> Completion:
        received = asyncio.Event()
        first = asyncio.create_task(
            engine.generate([1, 2], Sampling(max_tokens=100), on_tokens=lambda *tokens: received.set())
        )
        second = asyncio.create_task(engine.generate([3, 4], Sampling(max_tokens=100)))
        await received.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await second

    assert len(mode(run()).sampled_ids) == 100
    assert not engine._output_processor.states
    assert engine._output_processor.scheduler.pool.num_available == engine._runner.num_blocks


def test_a_failing_step_is_raised_to_every_caller_and_the_engine_recovers(mode: Callable) -> None:
    engine = build_engine()
    head = engine._runner.model.get_output_embeddings()
    hook = head.register_forward_hook(_raise_out_of_memory)

    async def run() -> list[Completion | BaseException]:
        calls = [engine.generate(prompt, Sampling(max_tokens=3)) for prompt in build_prompts(3, 50, 7)]
        return await asyncio.gather(*calls, return_exceptions=True)

    results = mode(run())
    assert [str(result) for result in results] == ["a step of the engine failed: RuntimeError: out of memory"] * 3
    assert all(isinstance(result, EngineError) for result in results)
    hook.remove()
    assert all(isinstance(result, Completion) for result in mode(run()))


def _raise_out_of_memory(*arguments: object) -> None:
    raise RuntimeError("out of memory")


def test_an_error_in_on_tokens_is_raised_to_its_caller(mode: Callable) -> None:
    engine = build_engine()

    def fail(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        raise KeyError("broken listener")

    async def run() -> list[Completion | BaseException]:
        calls = [
            engine.generate([1], Sampling(max_tokens=5), on_tokens=fail),
            engine.generate([2], Sampling(max_tokens=5)),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    broken, whole = mode(run())
    assert isinstance(broken, KeyError)
    assert isinstance(whole, Completion)


def test_callers_beyond_max_waiting_are_queued(mode: Callable) -> None:
    engine = build_engine(max_waiting=2, max_num_seqs=1)
    most = 0

    def watch(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        nonlocal most
        most = max(most, len(engine._inbox) + len(engine._output_processor.scheduler.waiting))

    async def run() -> list[Completion]:
        calls = [engine.generate([index], Sampling(max_tokens=3), on_tokens=watch) for index in range(9)]
        return await asyncio.gather(*calls)

    assert [len(completion.sampled_ids) for completion in mode(run())] == [3] * 9
    assert 0 < most <= 2


def test_a_paused_engine_samples_nothing_until_it_resumes(mode: Callable) -> None:
    engine = build_engine()

    async def run() -> Completion:
        engine.pause()
        task = asyncio.create_task(engine.generate([1], Sampling(max_tokens=3)))
        await asyncio.sleep(0.02)
        assert engine.compute_stats()["engine/num_steps"] == 0
        engine.resume(4)
        return await task

    assert mode(run()).policy_versions == (4, 4, 4)


def test_two_engines_share_one_loop() -> None:
    trained, auxiliary = build_engine(), build_engine("qwen2")

    async def run() -> list[Completion]:
        return await asyncio.gather(
            trained.generate([1, 2], Sampling(max_tokens=20)), auxiliary.generate([1, 2], Sampling(max_tokens=5))
        )

    assert [len(completion.sampled_ids) for completion in run_lockstep(run())] == [20, 5]
    assert trained.compute_stats()["engine/num_steps"] == 20


def run_scenario() -> list[Completion]:
    """Agents of several turns that hand work to threads of uneven length between turns."""
    engine = build_engine(max_batched_tokens=40, kv_cache_tokens=200)

    async def play(index: int) -> list[Completion]:
        prompt, turns = build_prompts(7 + index)[0], []
        for turn in range(3):
            if (index + turn) % 2:
                await asyncio.to_thread(time.sleep, 0.002 * (index % 3))
            sampling = Sampling(max_tokens=4 + 3 * (index % 4), seed=100 * index + turn)
            turns.append(await engine.generate(prompt, sampling, order=(index, turn)))
            prompt = [*prompt, *turns[-1].sampled_ids, 3]
        return turns

    async def run() -> list[Completion]:
        return [turn for turns in await asyncio.gather(*map(play, range(8))) for turn in turns]

    patient = RolloutSection(thread_patience_s=30)  # also while other programs keep the threads from running
    return run_lockstep(run(), patient)


def test_a_lockstep_run_is_reproducible_when_agents_use_threads() -> None:
    assert run_scenario() == run_scenario()


def test_a_thread_that_awaits_a_completion_does_not_hang() -> None:
    engine = build_engine()

    async def run() -> Completion:
        loop = asyncio.get_running_loop()

        def ask() -> Completion:
            call = engine.generate([1, 2], Sampling(max_tokens=5, distribution=GREEDY))
            return asyncio.run_coroutine_threadsafe(call, loop).result()

        return await asyncio.to_thread(ask)

    assert len(run_lockstep(run()).sampled_ids) == 5


def test_the_loop_still_serves_timers_and_other_threads_while_the_engine_works() -> None:
    engine = build_engine(max_model_len=100_000, kv_cache_tokens=100_000)

    async def run() -> None:
        loop, called = asyncio.get_running_loop(), asyncio.Event()
        long = asyncio.create_task(engine.generate([1], Sampling(max_tokens=50_000)))
        threading.Timer(0.02, loop.call_soon_threadsafe, (called.set,)).start()
        await called.wait()
        await asyncio.sleep(0.03)
        assert not long.done() and engine.compute_stats()["engine/num_steps"] > 1
        long.cancel()
        await asyncio.wait([long])

    run_lockstep(run())


def test_an_engine_works_after_a_loop_with_pending_requests_was_closed() -> None:
    engine = build_engine()
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.generate([1], Sampling(max_tokens=5)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.stop()
    loop.close()
    assert len(run_lockstep(engine.generate([1], Sampling(max_tokens=5))).sampled_ids) == 5
    assert not task.done()


def test_a_lockstep_run_is_reproducible_when_agents_sleep_briefly() -> None:
    """Agents nap between two calls; on a slow machine fewer steps would fit into a nap than on a fast one."""
    prompts = build_prompts(9, 14, 11, 7, 13, 10)

    def run_once(seconds_per_step: float) -> list[tuple[float, ...]]:
        engine = build_engine()
        step = engine.step

        def step_slowly() -> None:
            time.sleep(seconds_per_step)
            step()

        engine.step = step_slowly

        async def act(index: int, prompt: list[int]) -> tuple[float, ...]:
            first = await engine.generate(prompt, Sampling(max_tokens=4 + index, seed=index), order=(index,))
            await asyncio.sleep(0.008)
            longer = [*prompt, *first.sampled_ids]
            second = await engine.generate(longer, Sampling(max_tokens=6, seed=index), order=(index,))
            return first.logprobs + second.logprobs

        async def run() -> list[tuple[float, ...]]:
            return await asyncio.gather(*[act(index, prompt) for index, prompt in enumerate(prompts)])

        logprobs = run_lockstep(run())
        return [*logprobs, (engine.compute_stats()["engine/num_steps"],)]

    assert run_once(0.0) == run_once(0.02)


def test_an_agent_that_polls_for_its_completion_receives_it() -> None:
    engine = build_engine()

    async def run() -> Completion:
        pending = asyncio.ensure_future(engine.generate([1, 2, 3], Sampling(max_tokens=3)))
        while not pending.done():  # noqa: ASYNC110 - what some agents do
            await asyncio.sleep(0.002)
        return pending.result()

    assert len(run_lockstep(run()).sampled_ids) == 3


def test_garbage_collection_thresholds_are_restored_when_the_loop_is_closed() -> None:
    before = gc.get_threshold()
    engine = build_engine()

    async def run() -> tuple[int, int, int]:
        await engine.generate([1], Sampling(max_tokens=1))
        return gc.get_threshold()

    assert run_lockstep(run())[0] >= max(before[0], clock.MIN_NEW_OBJECTS)
    assert gc.get_threshold() == before


def test_objects_are_frozen_while_the_loop_runs() -> None:
    async def is_frozen() -> bool:
        return are_objects_frozen()

    assert run_lockstep(is_frozen())


def test_the_wait_for_tools_is_measured_but_not_code_that_blocks() -> None:
    engine = build_engine()

    async def run() -> tuple[float, float]:
        await engine.generate([1, 2], Sampling(max_tokens=3))
        engine.compute_stats()
        await asyncio.sleep(0.2)
        waited_s = engine.compute_stats()["perf/tool_wait_s"]
        time.sleep(0.2)  # noqa: ASYNC251
        return waited_s, engine.compute_stats()["perf/tool_wait_s"]

    waited_s, blocked_s = run_lockstep(run())
    assert waited_s > 0.15 and blocked_s == 0.0
