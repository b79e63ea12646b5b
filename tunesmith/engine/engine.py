"""The sampler on the trainer's own model: what rollouts call, and what a clock steps.

`generate` puts a request into an inbox; each step takes the inbox in, lets the scheduler choose, runs the model once
and hands tokens and completions to the event loop. Only `step`, `pause` and `resume` touch the scheduler, under a lock,
so the clock may be the event loop or a thread. `resume` forgets every key and value: nothing of another version of the
weights is read again, and what was in flight computes its tokens anew while old tokens keep their version.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.config import EngineSection
from tunesmith.engine.block import Block
from tunesmith.engine.calls import Call, News, find_first_stop, find_stop, hand_out
from tunesmith.engine.clock import Clock, build_clock
from tunesmith.engine.pages import PagePool
from tunesmith.engine.request import Request, check_sampling
from tunesmith.engine.runner import Runner
from tunesmith.engine.sampling import Draws
from tunesmith.engine.scheduler import Schedule, Scheduler, Work
from tunesmith.engine.stops import StopMatcher
from tunesmith.errors import EngineError
from tunesmith.types import Completion, OnToken, Sampling, StopReason


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
        self._scheduler = self._build_scheduler()
        self._policy_version = 0
        self._is_paused = False
        self._lock = threading.RLock()
        self._inbox: deque[Call] = deque()
        self._cancelled: deque[int] = deque()
        self._calls: dict[int, Call] = {}
        self._num_arrived = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock: Clock | None = None
        self._places = asyncio.Semaphore(settings.max_waiting)
        self._counts: Counter[str] = Counter()
        self._busy_s = 0.0

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def has_work(self) -> bool:
        return not self._is_paused and bool(self._inbox or self._cancelled or self._scheduler.has_requests)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_token: OnToken | None = None,
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
        )
        self._num_arrived += 1
        future = asyncio.get_running_loop().create_future()
        matcher = StopMatcher(self._tokenizer, sampling.stop) if sampling.stop and self._tokenizer else None
        self._inbox.append(Call(request=request, future=future, on_token=on_token, matcher=matcher))
        self._notify()
        try:
            return await future
        finally:
            if future.cancelled():
                self._cancelled.append(request.request_id)
                self._notify()

    def pause(self) -> None:
        """Stop sampling once the step under way has ended; requests stay queued."""
        with self._lock:
            self._is_paused = True

    def resume(self, policy_version: int) -> None:
        """Sample on with the weights as they are now; every key and value so far is forgotten."""
        with self._lock:
            self._policy_version = policy_version
            self._scheduler.restart(policy_version)
            self._runner.notice_new_weights()
            self._is_paused = False
        self._notify()

    def compute_stats(self) -> dict[str, float]:
        """Counters since the last call."""
        with self._lock:
            names = ("requests", "steps", "sampled_tokens", "prefill_tokens", "cached_tokens", "preemptions")
            stats = {f"engine/num_{name}": float(self._counts[name]) for name in names}
            stats["perf/engine_busy_s"] = self._busy_s
            self._counts.clear()
            self._busy_s = 0.0
            return stats

    def step(self) -> None:
        """Compute one batch and hand its results to the event loop; a failure ends the requests, not the clock."""
        with self._lock:
            if self._is_paused:
                return
            started_at = time.perf_counter()
            news = News()
            try:
                self._run_step(news)
            except Exception as error:  # noqa: BLE001 - whatever failed, every caller must learn of it or wait for ever
                self._fail_all(news, error)
            self._busy_s += time.perf_counter() - started_at
        self._send(news)

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._leave_loop()
            self._loop = loop
            self._clock = build_clock(self, is_lockstep=self._is_lockstep)
            self._places = asyncio.Semaphore(self._settings.max_waiting)

    def _leave_loop(self) -> None:
        """Drop what a closed loop left behind; refuse to leave one that still waits for us."""
        if not (self._calls or self._inbox):
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("requests of another event loop are in flight; an engine serves one loop at a time")
        with self._lock:
            self._take_in()
            for call in list(self._calls.values()):
                self._scheduler.remove(call.request)
                self._forget(call, News())

    def _notify(self) -> None:
        if self._clock is not None and self.has_work:
            self._clock.notify()

    def _build_scheduler(self) -> Scheduler:
        return Scheduler(
            PagePool(self._runner.num_pages),
            page_size=self._settings.page_size,
            max_num_seqs=self._settings.max_num_seqs,
            max_batched_tokens=self._settings.max_batched_tokens,
            has_prefix_cache=self._settings.has_prefix_cache,
        )

    def _run_step(self, news: News) -> None:
        self._take_in()
        self._drop_cancelled(news)
        self._end_expired(news)
        schedule = self._scheduler.schedule()
        for request in schedule.stuck:
            self._end(self._calls[request.request_id], "context", news)
        if not schedule.work:
            return
        self._count(schedule, news)
        in_block = [item for item in schedule.work if self._runner.can_decode_block(item)]
        others = [item for item in schedule.work if not self._runner.can_decode_block(item)]
        if others:
            sampling, draws = self._runner.run(others)
            self._scheduler.commit(others)
            self._take_draws(sampling, draws, news)
        if in_block:
            num_steps = self._scheduler.reserve(
                in_block, self._settings.decode_block, max_model_len=self._max_model_len
            )
            self._take_block(in_block, self._runner.decode_block(in_block, num_steps=num_steps), news)

    def _take_in(self) -> None:
        while self._inbox:
            call = self._inbox.popleft()
            self._calls[call.request.request_id] = call
            self._scheduler.add(call.request)

    def _drop_cancelled(self, news: News) -> None:
        while self._cancelled:
            call = self._calls.get(self._cancelled.popleft())
            if call is not None:
                self._scheduler.remove(call.request)
                self._end(call, "cancelled", news)

    def _end_expired(self, news: News) -> None:
        now = time.monotonic()
        expired = [c for c in self._calls.values() if c.request.deadline_at is not None and c.request.deadline_at < now]
        for call in expired:
            self._scheduler.remove(call.request)
            self._end(call, "deadline", news)

    def _count(self, schedule: Schedule, news: News) -> None:
        self._counts["steps"] += 1
        self._counts["preemptions"] += schedule.num_preemptions
        for item in schedule.work:
            call = self._calls[item.request.request_id]
            if item.stop - item.start > 1 or item.start < len(item.request.prompt_ids):
                self._counts["prefill_tokens"] += item.stop - item.start
            if call.is_queued:
                call.is_queued = False
                news.num_places += 1
                self._counts["requests"] += 1
                self._counts["cached_tokens"] += item.request.num_cached_tokens or 0

    def _take_draws(self, sampling: Sequence[Work], draws: Draws, news: News) -> None:
        self._counts["sampled_tokens"] += len(sampling)
        rows = zip(sampling, draws.token_ids, draws.logprobs, draws.is_finite, strict=True)
        for item, token_id, logprob, is_finite in rows:
            call = self._calls[item.request.request_id]
            if not is_finite:
                self._fail(call, news)
                continue
            call.request.append(token_id, logprob, self._policy_version)
            if call.on_token is not None:
                news.tokens.append((call, token_id, logprob))
            stop_reason = find_stop(call, token_id, eos_ids=self._eos_ids, max_model_len=self._max_model_len)
            if stop_reason is not None:
                self._scheduler.remove(call.request)
                self._end(call, stop_reason, news)

    def _take_block(self, work: Sequence[Work], block: Block, news: News) -> None:
        """Keep each row's tokens up to the one that ends it."""
        for item, token_ids, logprobs in zip(work, block.token_ids, block.logprobs, strict=True):
            call, request = self._calls[item.request.request_id], item.request
            num_kept, stop_reason = find_first_stop(
                call, token_ids, eos_ids=self._eos_ids, max_model_len=self._max_model_len
            )
            if not math.isfinite(sum(logprobs[:num_kept])):
                self._fail(call, news)
                continue
            request.extend(token_ids[:num_kept], logprobs[:num_kept], self._policy_version)
            if call.on_token is not None:
                news.tokens += [(call, *drawn) for drawn in zip(token_ids[:num_kept], logprobs, strict=False)]
            self._counts["sampled_tokens"] += num_kept
            self._scheduler.commit([Work(request, item.start, item.start + num_kept)])
            if stop_reason is not None:
                self._scheduler.remove(request)
                self._end(call, stop_reason, news)

    def _end(self, call: Call, stop_reason: StopReason, news: News) -> None:
        news.endings.append((call, call.request.complete(stop_reason)))
        self._forget(call, news)

    def _fail(self, call: Call, news: News) -> None:
        """End a request whose logits were not finite, and wipe its pages: others may be given them."""
        request = call.request
        news.endings.append((call, EngineError(
            f"logits of request {request.request_id} are not finite after {len(request.token_ids)} tokens "
            f"({len(request.prompt_ids)} of prompt) at policy version {self._policy_version}; "
            "lower the learning rate, or look for broken weights"
        )))  # fmt: skip
        self._runner.cache.clear(request.pages)
        self._scheduler.pool.forget(request.pages)
        self._scheduler.remove(request)
        self._forget(call, news)

    def _fail_all(self, news: News, error: Exception) -> None:
        self._take_in()
        for call in list(self._calls.values()):
            failure = EngineError(f"a step of the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            news.endings.append((call, failure))
            self._forget(call, news)
        self._scheduler = self._build_scheduler()
        self._scheduler.restart(self._policy_version)

    def _forget(self, call: Call, news: News) -> None:
        del self._calls[call.request.request_id]
        news.num_places += call.is_queued
        call.is_queued = False

    def _send(self, news: News) -> None:
        if self._loop is None or self._loop.is_closed() or not (news.tokens or news.endings or news.num_places):
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
