"""Which tokens of which requests each step computes."""

from __future__ import annotations

import pytest

from tunesmith.engine.core.block_manager import BlockPool
from tunesmith.engine.core.request import Request
from tunesmith.engine.core.scheduler import Scheduler, SchedulerOutput
from tunesmith.types import Sampling


def build_scheduler(
    *,
    num_blocks: int = 100,
    max_num_seqs: int = 8,
    max_batched_tokens: int = 100,
    has_prefix_cache: bool = True,
    prefers_runs: bool = False,
) -> Scheduler:
    return Scheduler(
        BlockPool(num_blocks),
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        has_prefix_cache=has_prefix_cache,
        prefers_runs=prefers_runs,
    )


def build_request(request_id: int, prompt: range | list[int], order: tuple[int, ...] = ()) -> Request:
    return Request(request_id=request_id, prompt_ids=tuple(prompt), sampling=Sampling(max_tokens=100), order=order)


def run_step(scheduler: Scheduler) -> SchedulerOutput:
    """Schedule, and sample token 7 where a token is sampled."""
    step = scheduler.schedule()
    scheduler.commit(step.chunks)
    for chunk in step.chunks:
        if chunk.has_last_token:
            chunk.request.extend([7], [-1.0], 0)
    return step


def describe(step: SchedulerOutput) -> list[tuple[int, int, int]]:
    return [(chunk.request.request_id, chunk.start, chunk.stop) for chunk in step.chunks]


def test_requests_are_admitted_by_order_then_by_arrival() -> None:
    scheduler = build_scheduler(max_num_seqs=3)
    for request_id, order in enumerate([(2,), (1,), (1,), (0, 5)]):
        scheduler.add(build_request(request_id, [request_id], order))
    assert describe(run_step(scheduler)) == [(3, 0, 1), (1, 0, 1), (2, 0, 1)]


def test_prompts_are_prefilled_in_chunks_alongside_decoding_requests() -> None:
    scheduler = build_scheduler(max_batched_tokens=5)
    scheduler.add(build_request(0, range(10, 13)))
    scheduler.add(build_request(1, range(20, 29)))
    steps = [describe(run_step(scheduler)) for _ in range(4)]
    assert steps == [
        [(0, 0, 3), (1, 0, 2)],
        [(0, 3, 4), (1, 2, 6)],
        [(0, 4, 5), (1, 6, 9)],
        [(0, 5, 6), (1, 9, 10)],
    ]


def test_equal_prompts_compute_their_full_blocks_once() -> None:
    scheduler = build_scheduler()
    for request_id in range(3):
        scheduler.add(build_request(request_id, range(10, 20)))
    assert describe(run_step(scheduler)) == [(0, 0, 10), (1, 8, 10), (2, 8, 10)]
    assert [request.num_cached_tokens for request in scheduler.running] == [0, 8, 8]
    assert len({tuple(request.blocks[:2]) for request in scheduler.running}) == 1
    assert len({request.blocks[2] for request in scheduler.running}) == 3


def test_blocks_of_a_chunk_are_shared_from_the_step_that_fills_the_last_one() -> None:
    scheduler = build_scheduler(max_batched_tokens=7)
    scheduler.add(build_request(0, range(10, 20)))
    scheduler.add(build_request(1, range(10, 20)))
    assert describe(run_step(scheduler)) == [(0, 0, 7)]
    assert describe(run_step(scheduler)) == [(0, 7, 10), (1, 8, 10)]
    assert [request.num_cached_tokens for request in scheduler.running] == [0, 8]


@pytest.mark.parametrize(("forward", "start"), [(0, 8), (1, 4)])
def test_a_block_that_one_token_fills_is_shared_in_the_first_forward_alone(forward: int, start: int) -> None:
    """Kernels that decode attend to the keys of a step while they write them."""
    scheduler = build_scheduler(max_batched_tokens=7)
    scheduler.add(build_request(0, range(10, 18)))
    scheduler.commit(scheduler.schedule().chunks)
    scheduler.add(build_request(1, range(10, 19)))
    assert describe(scheduler.schedule(get_forward=lambda _: forward)) == [(0, 7, 8), (1, start, 9)]


def test_the_last_token_of_a_prompt_is_computed_even_if_its_block_is_cached() -> None:
    scheduler = build_scheduler()
    scheduler.add(build_request(0, range(10, 18)))
    run_step(scheduler)
    scheduler.remove(scheduler.running[0])
    scheduler.add(build_request(1, range(10, 18)))
    assert describe(run_step(scheduler)) == [(1, 4, 8)]


def test_the_next_turn_of_a_conversation_reuses_blocks_of_sampled_tokens() -> None:
    scheduler = build_scheduler()
    first = build_request(0, range(10, 15))
    scheduler.add(first)
    for _ in range(4):
        run_step(scheduler)
    scheduler.remove(first)
    assert first.token_ids == [*range(10, 15), 7, 7, 7, 7]
    scheduler.add(build_request(1, [*first.token_ids, 30]))
    assert describe(run_step(scheduler)) == [(1, 8, 10)]


def test_without_a_prefix_cache_every_prompt_is_computed() -> None:
    scheduler = build_scheduler(has_prefix_cache=False)
    scheduler.add(build_request(0, range(10, 20)))
    scheduler.add(build_request(1, range(10, 20)))
    assert describe(run_step(scheduler)) == [(0, 0, 10), (1, 0, 10)]


def test_when_blocks_run_out_the_lowest_priority_is_preempted_and_recomputed() -> None:
    scheduler = build_scheduler(num_blocks=4, has_prefix_cache=False)
    scheduler.add(build_request(0, range(10, 14), order=(1,)))
    scheduler.add(build_request(1, range(20, 24), order=(0,)))
    run_step(scheduler)
    for _ in range(4):
        assert len(run_step(scheduler).chunks) == 2
    late, early = scheduler.running[1], scheduler.running[0]
    step = run_step(scheduler)
    assert step.num_preemptions == 1
    assert describe(step) == [(1, 8, 9)]
    assert scheduler.waiting == [late]
    assert late.token_ids == [10, 11, 12, 13, 7, 7, 7, 7, 7]
    assert late.logprobs == [-1.0] * 5
    scheduler.remove(early)
    assert describe(run_step(scheduler)) == [(0, 0, 9)]


def test_reset_cache_frees_all_blocks_and_keeps_all_requests() -> None:
    scheduler = build_scheduler()
    scheduler.add(build_request(0, range(10, 20)))
    run_step(scheduler)
    scheduler.add(build_request(1, range(10, 20)))
    scheduler.reset_cache(1)
    assert scheduler.pool.num_available == 100
    assert describe(run_step(scheduler)) == [(0, 0, 11), (1, 8, 10)]
    assert describe(run_step(scheduler)) == [(0, 11, 12), (1, 10, 11)]


def test_blocks_of_requests_that_grow_together_stay_contiguous() -> None:
    scheduler = build_scheduler(num_blocks=400, prefers_runs=True)
    for request_id in range(4):
        scheduler.add(build_request(request_id, range(10, 21)))
    for _ in range(100):
        run_step(scheduler)
    for request in scheduler.running:
        assert len(request.blocks) == 28
        assert len(request.find_runs()) <= 3
        assert [
            block for run in request.runs for block in range(run.first, run.first + run.num_blocks)
        ] == request.blocks
    scheduler.reset_cache(1)
    assert all(not request.find_runs() for request in scheduler.waiting)


def run_turn(scheduler: Scheduler, request_id: int, prompt: range, order: tuple[int, ...]) -> None:
    """A request from its arrival to its end, without new tokens."""
    request = build_request(request_id, prompt, order)
    scheduler.add(request)
    scheduler.commit(scheduler.schedule().chunks)
    scheduler.remove(request)


def test_a_request_waits_that_would_evict_a_conversation_before_its_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.engine.core.scheduler.MIN_RUNNING", 1)
    scheduler = build_scheduler(num_blocks=12)
    run_turn(scheduler, 0, range(16), (0, 0, 0, 0))
    run_turn(scheduler, 1, range(100, 108), (1, 0, 0, 0))
    run_turn(scheduler, 2, range(20), (0, 0, 1, 0))  # one request ended between its turns: prefixes are kept for two
    runs = build_request(3, range(200, 208), (2, 0, 0, 0))
    scheduler.add(runs)
    assert describe(scheduler.schedule()) == [(3, 0, 8)]
    scheduler.commit([])
    evicts = build_request(4, range(300, 332), (3, 0, 0, 0))
    scheduler.add(evicts)
    scheduler.schedule()
    assert evicts.slot is None  # four blocks are free, and the others hold the prefixes of both conversations
    next_turn = build_request(5, range(24), (0, 0, 2, 0))
    scheduler.add(next_turn)
    scheduler.schedule()
    assert next_turn.num_cached_tokens == 20
    scheduler.remove(next_turn)
    scheduler.remove(runs)
    scheduler.schedule()
    assert evicts.slot is not None  # nothing else runs


def test_finished_requests_without_a_next_turn_are_evicted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.engine.core.scheduler.MIN_RUNNING", 1)
    scheduler = build_scheduler(num_blocks=12)
    for request_id in range(2):
        run_turn(scheduler, request_id, range(100 * request_id, 100 * request_id + 16), (request_id, 0, 0, 0))
    runs = build_request(2, range(200, 208), (2, 0, 0, 0))
    evicts = build_request(3, range(300, 332), (3, 0, 0, 0))
    scheduler.add(runs)
    scheduler.commit(scheduler.schedule().chunks)
    scheduler.add(evicts)
    scheduler.schedule()
    assert evicts.slot is not None
