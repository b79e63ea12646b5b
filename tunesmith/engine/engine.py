"""The sampler on the trainer's own model: what rollouts call, and what a clock steps.

`generate` puts a request into an inbox; each step takes the inbox in, lets the scheduler choose, runs the model once
and hands tokens and completions to the event loop. Only `step`, `pause` and `resume` touch the scheduler, under a lock,
so the clock may be the event loop or a thread. `resume` forgets every key and value: nothing of another version of the
weights is read again, and what was in flight computes its tokens anew while old tokens keep their version.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.config import EngineSection
from tunesmith.engine.core.block_manager import PagePool
from tunesmith.engine.core.output_processor import Call, Desk, News, hand_out
from tunesmith.engine.core.request import Request, check_sampling
from tunesmith.engine.core.scheduler import Scheduler
from tunesmith.engine.core.stop_strings import StopMatcher
from tunesmith.engine.event_loop.clock import Clock, build_clock
from tunesmith.engine.worker.async_step import BlockStepper
from tunesmith.engine.worker.model_runner import Runner
from tunesmith.engine.worker.sync_step import TokenStepper
from tunesmith.model.device_errors import explain_device_error
from tunesmith.model.torch_modes import default_modes
from tunesmith.types import Completion, OnTokens, Sampling

LESS_MEMORY = "lower engine.kv_cache_gib, engine.max_num_seqs or engine.max_batched_tokens"


class LocalEngine:
    """Continuous batching on a model in this process; implements `tunesmith.types.Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: EngineSection,
        *,
        max_model_len: int,
        lockstep: bool = True,
    ) -> None:
        """Without a tokenizer there are no stop strings.

        In lockstep the engine steps when every coroutine waits. Otherwise a thread steps whenever there is work, for
        an event loop that must stay responsive; agents and engine then compete for the interpreter.
        """
        self._settings = settings
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._is_lockstep = lockstep
        self._eos_ids = collect_eos_ids(model, tokenizer)
        self._vocab_size = model.get_input_embeddings().num_embeddings
        self._runner = Runner(model, settings, max_model_len=max_model_len)
        self._desk, self._stepper = self._build_stepper()
        self._is_paused = False
        self._lock = threading.RLock()
        self._inbox: deque[Call] = deque()
        self._cancelled: deque[int] = deque()
        self._num_arrived = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock: Clock | None = None
        self._places = asyncio.Semaphore(settings.max_waiting)
        self._busy_s = 0.0
        self._num_cpu_threads = torch.get_num_threads()

    @property
    def policy_version(self) -> int:
        return self._desk.policy_version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def has_work(self) -> bool:
        if self._is_paused:
            return False
        return bool(
            self._inbox or self._cancelled or self._desk.scheduler.has_requests or self._stepper.has_flight
        )  # fmt: skip

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion; see `tunesmith.types.Engine`."""
        check_sampling(prompt_ids, sampling, self._vocab_size)
        if sampling.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none; use stop_token_ids")
        deadline_at = None if sampling.deadline_s is None else time.monotonic() + sampling.deadline_s
        self._bind_loop()
        if len(prompt_ids) >= self._max_model_len:
            return Completion(sampled_ids=(), logprobs=(), policy_versions=(), stop_reason="context")
        await self._places.acquire()
        request = Request(
            request_id=self._num_arrived,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            order=order,
            deadline_at=deadline_at,
            max_model_len=self._max_model_len,
        )
        self._num_arrived += 1
        future = asyncio.get_running_loop().create_future()
        matcher = StopMatcher(self._tokenizer, sampling.stop) if sampling.stop and self._tokenizer else None
        self._inbox.append(Call(request=request, future=future, on_tokens=on_tokens, matcher=matcher))
        self._notify()
        try:
            return await future
        finally:
            if future.cancelled():
                self._cancelled.append(request.request_id)
                self._notify()

    def pause(self) -> None:
        """Stop sampling once the step under way has ended; requests stay queued, and nothing is left on the device."""
        with self._lock:
            self._is_paused = True
            self._guard(self._stepper.drain)
        self._send()

    def resume(self, policy_version: int) -> None:
        """Sample on with the weights as they are now; every key and value so far is forgotten."""
        with self._lock:
            self._guard(self._stepper.drain)
            self._desk.policy_version = policy_version
            self._desk.scheduler.restart(policy_version)
            self._runner.notice_new_weights()
            self._is_paused = False
        self._send()
        self._notify()

    def compute_stats(self) -> dict[str, float]:
        """Counters since the last call."""
        with self._lock:
            names = ("requests", "steps", "sampled_tokens", "prefill_tokens", "cached_tokens", "preemptions")
            counts = self._desk.counts
            stats = {f"engine/num_{name}": float(counts[name]) for name in names}
            stats["perf/engine_busy_s"] = self._busy_s
            counts.clear()
            self._busy_s = 0.0
            return stats

    def step(self) -> None:
        """Compute one batch and hand its results to the event loop; a failure ends the requests, not the clock."""
        with self._lock:
            if self._is_paused:
                return
            started_at = time.perf_counter()
            self._guard(self._step)
            self._busy_s += time.perf_counter() - started_at
        self._send()

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._leave_loop()
            self._loop = loop
            self._clock = build_clock(self, is_lockstep=self._is_lockstep)
            self._places = asyncio.Semaphore(self._settings.max_waiting)

    def _leave_loop(self) -> None:
        """Drop what a closed loop left behind; refuse to leave one that still waits for us."""
        if not (self._desk.calls or self._inbox):
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("requests of another event loop are in flight; an engine serves one loop at a time")
        with self._lock:
            self._guard(self._stepper.drain)
            self._take_in()
            for call in list(self._desk.calls.values()):
                self._desk.end(call, "cancelled")
            self._desk.take_news()

    def _notify(self) -> None:
        if self._clock is not None and self.has_work:
            self._clock.notify()

    def _build_stepper(self) -> tuple[Desk, TokenStepper]:
        scheduler = Scheduler(
            PagePool(self._runner.num_pages),
            page_size=self._settings.page_size,
            max_num_seqs=self._settings.max_num_seqs,
            max_batched_tokens=self._runner.max_batched_tokens,
            has_prefix_cache=self._settings.has_prefix_cache,
            keeps_runs=not self._runner.has_graphs,
        )
        desk = Desk(scheduler, eos_ids=self._eos_ids)
        if self._runner.has_graphs:
            return desk, BlockStepper(self._runner, desk, block=self._settings.decode_block)
        return desk, TokenStepper(self._runner, desk)

    def _guard(self, work: Callable[[], None]) -> None:
        """Do work on the device, under torch's modes as they should be; whatever fails, every caller must learn of it
        or wait for ever."""
        try:
            with default_modes(num_threads=self._num_cpu_threads):
                work()
        except Exception as error:  # noqa: BLE001
            self._take_in()
            self._desk.fail_all(explain_device_error(error, work="a step of the engine", advice=LESS_MEMORY), error)
            failed, (self._desk, self._stepper) = self._desk, self._build_stepper()
            self._desk.take_over(failed)

    def _step(self) -> None:
        self._take_in()
        self._drop_cancelled()
        self._end_expired()
        self._stepper.step()

    def _take_in(self) -> None:
        while self._inbox:
            self._desk.open(self._inbox.popleft())

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            call = self._desk.calls.get(self._cancelled.popleft())
            if call is not None:
                self._desk.end(call, "cancelled")

    def _end_expired(self) -> None:
        """End the calls whose deadline has passed; most have none."""
        if not self._desk.num_deadlines:
            return
        now = time.monotonic()
        for call in list(self._desk.calls.values()):
            if call.request.deadline_at is not None and call.request.deadline_at < now:
                self._desk.end(call, "deadline")

    def _send(self) -> None:
        """Let the event loop hand out what happened."""
        news = self._desk.take_news()
        if not news or self._loop is None or self._loop.is_closed():
            return
        if self._is_lockstep:
            self._loop.call_soon(self._deliver, news)
        else:
            self._loop.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: News) -> None:
        """In the event loop: hand out the news and let as many callers in as places came free."""
        self._cancelled.extend(hand_out(news))
        for _ in range(news.num_places):
            self._places.release()


def collect_eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """End-of-sequence ids of the generation config, the model config and the tokenizer together."""
    ids: set[int] = set()
    for holder in (model.generation_config, model.config, tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            ids.update(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset(ids)
