"""The inference engine on the trainer's own model: `generate` for rollouts, `step` for the clock that drives it.

`generate` appends a request to an inbox. Each step moves the inbox to the scheduler, schedules, runs the model once and
passes tokens and completions to the event loop. `resume` drops all keys and values, so none of another version of the
weights is read; unfinished requests are recomputed, and tokens sampled so far keep their policy version. With
`keeps_cache` they keep theirs, and their tokens the version of the oldest keys and values that they depend on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.config import EngineSection
from tunesmith.engine.core.base_engine import BaseEngine
from tunesmith.engine.core.block_manager import BlockPool
from tunesmith.engine.core.drafts import CPU_COST, CUDA_COST, Drafter
from tunesmith.engine.core.output_processor import OutputProcessor, RequestState, StepOutput, deliver_output
from tunesmith.engine.core.request import Request
from tunesmith.engine.core.scheduler import Scheduler
from tunesmith.engine.event_loop.clock import Clock, build_clock
from tunesmith.engine.worker.model_runner import ModelRunner
from tunesmith.engine.worker.steppers import AsyncStepper, SyncStepper
from tunesmith.model.device_errors import explain_device_error
from tunesmith.model.experts import RouteRecorder
from tunesmith.model.torch_modes import default_modes
from tunesmith.types import Completion, DeferredTokens, OnTokens, Sampling

logger = logging.getLogger(__name__)

SMALL_CACHE_WARNING = (
    "the KV cache has room for %d tokens, fewer than model.max_model_len=%d, and limits the context: lower "
    "model.max_model_len, or raise engine.kv_cache_gib or engine.kv_cache_tokens"
)
MEMORY_ADVICE = "lower engine.kv_cache_gib, engine.max_num_seqs or engine.max_batched_tokens"


class LocalEngine(BaseEngine):
    """Continuous batching on a model in this process; implements `tunesmith.types.Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: EngineSection,
        *,
        max_model_len: int,
        has_trainer: bool = True,
    ) -> None:
        """Stop strings need a tokenizer. `has_trainer`: whether the model is also trained on its device."""
        super().__init__(model, tokenizer, max_model_len=max_model_len)
        self._settings = settings
        self._runner = ModelRunner(
            model, settings, max_model_len=max_model_len, grammars=self.grammars, has_trainer=has_trainer
        )
        # the last token of a reply needs no place in the cache
        self.max_model_len = min(max_model_len, self._runner.num_blocks * settings.page_size + 1)
        if self.max_model_len < max_model_len:
            logger.warning(SMALL_CACHE_WARNING, self.max_model_len - 1, max_model_len)
        self._output_processor, self._stepper = self._build_stepper()
        self._is_paused = False
        self._lock = threading.RLock()
        self._inbox: deque[RequestState] = deque()
        self._cancelled: deque[int] = deque()
        self._undelivered: deque[StepOutput] = deque()
        self._hold_ended: asyncio.Event | None = None
        """Between `hold` and `release`: set when callers that waited for a place before `hold` may have one."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clock: Clock | None = None
        self._reported_wait_s = 0.0
        """The clock's `waited_s` at the last report."""
        self._num_cpu_threads = torch.get_num_threads()

    def record_routes(self) -> None:
        """Return the experts of all tokens with the completions that follow (`trainer.routing_replay`)."""
        runner, settings = self._runner, self._settings
        num_slots = (runner.num_blocks + runner.has_graphs) * settings.page_size
        max_tokens = 2 * max(runner.max_batched_tokens, settings.max_num_seqs)  # with the padding of graphs
        runner.cache.routes = RouteRecorder(runner.model, num_slots=num_slots, max_tokens=max_tokens)

    @property
    def policy_version(self) -> int:
        return self._output_processor.scheduler.policy_version

    @property
    def has_work(self) -> bool:
        if self._is_paused:
            return False
        has_requests = self._output_processor.scheduler.has_requests
        return bool(self._inbox or self._cancelled or has_requests or self._stepper.has_inflight)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion; see `tunesmith.types.Engine`."""
        self._check(prompt_ids, sampling)
        grammar = sampling.distribution.grammar
        token_matcher = self.grammars.open(grammar) if grammar else None
        self._bind_loop()
        is_before_hold = self._hold_ended is None
        await self._queue_places.acquire()
        while is_before_hold and self._hold_ended is not None:
            self._queue_places.release()
            await self._hold_ended.wait()
            await self._queue_places.acquire()
        state = self._build_state(prompt_ids, sampling, on_tokens=on_tokens, order=order, token_matcher=token_matcher)
        if isinstance(on_tokens, DeferredTokens):
            on_tokens.read, state.on_tokens = partial(self._copy_tokens, state.request), None
        self._inbox.append(state)
        self._usage.enter(None)
        self._notify()
        try:
            return await state.future
        finally:
            if state.future.cancelled():
                self._cancelled.append(state.request.request_id)
                self._notify()

    def _copy_tokens(self, request: Request) -> Completion:
        with self._lock:
            return self._output_processor.copy_tokens(request)

    def pause(self) -> None:
        """Stop sampling after the current step; requests stay queued, and no work is left in the device's queue."""
        with self._lock:
            self._is_paused = True
            self._usage.enter(None)
            self._run_guarded(self._stepper.drain)
        self._deliver_own()

    def resume(self, policy_version: int, *, keeps_cache: bool = False) -> None:
        """Continue sampling with the current weights; cached keys and values are dropped.

        With `keeps_cache` running requests keep theirs, and no other request reads them.
        """
        with self._lock:
            # tokens in flight were sampled with the old weights, so they are read before the version changes
            self._run_guarded(self._stepper.drain)
            self._deliver_own()
            scheduler = self._output_processor.scheduler
            (scheduler.keep_cache if keeps_cache else scheduler.reset_cache)(policy_version)
            self._runner.mark_weights_updated()
            self._is_paused = False
            self._usage.enter(None if self.has_work else "idle")
        self._notify()

    def hold(self) -> None:
        """Pause, and set all unfinished requests aside: until `release`, `resume` samples later ones only.

        Callers that wait for a place in the queue wait until then too.
        """
        self.pause()
        self._hold_ended = asyncio.Event()
        with self._lock:
            self._receive_requests()
            self._output_processor.hold()
        self._deliver_own()

    def release(self) -> None:
        """Pause, and put the requests of `hold` back; they are computed again from their start."""
        self.pause()
        with self._lock:
            self._output_processor.scheduler.release_held()
        if self._hold_ended is not None:
            self._hold_ended.set()
            self._hold_ended = None

    def compute_stats(self) -> dict[str, float]:
        """Metrics since the last call."""
        with self._lock:
            names = ["requests", "steps", "sampled_tokens", "prefill_tokens", "cached_tokens", "preemptions"]
            if self._output_processor.drafter is not None:
                names += ["drafted_tokens", "accepted_tokens"]
            counts = self._output_processor.counts
            stats = {f"engine/num_{name}": float(counts[name]) for name in names}
            stats |= self._usage.take()
            waited_s = None if self._clock is None else self._clock.waited_s
            if waited_s is not None:
                stats["perf/tool_wait_s"] = waited_s - self._reported_wait_s
                self._reported_wait_s = waited_s
            counts.clear()
            return stats

    def step(self) -> None:
        """Run one step and pass its output to the event loop; an error fails the requests but never raises."""
        with self._lock:
            if self._is_paused:
                return
            self._usage.enter("busy")
            self._run_guarded(self._step)
            # without a request every workflow waits for tools or runs its own code
            self._usage.enter(None if self.has_work else "idle")
        self._schedule_delivery()

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._abandon_loop()
            self._undelivered.clear()
            self._loop = loop
            self._clock = build_clock(self)
            self._reported_wait_s = self._clock.waited_s or 0.0
            self._queue_places = asyncio.Semaphore(self._settings.max_waiting)

    def _abandon_loop(self) -> None:
        """Cancel the requests of a closed event loop; raise if the loop is still open and has requests."""
        if not (self._output_processor.states or self._inbox):
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("requests of another event loop are in flight; an engine serves one loop at a time")
        with self._lock:
            self._run_guarded(self._stepper.drain)
            self._receive_requests()
            for state in list(self._output_processor.states.values()):
                self._output_processor.finish(state, "cancelled")
            self._output_processor.take_output()

    def _notify(self) -> None:
        if self._clock is not None and self.has_work:
            self._clock.notify()

    def _build_stepper(self) -> tuple[OutputProcessor, SyncStepper]:
        scheduler = Scheduler(
            BlockPool(self._runner.num_blocks),
            block_size=self._settings.page_size,
            max_num_seqs=self._settings.max_num_seqs,
            max_batched_tokens=self._runner.max_batched_tokens,
            has_prefix_cache=self._settings.has_prefix_cache,
            prefers_runs=not self._runner.has_graphs,
            **self._runner.slots,
        )
        drafter, max_requests = None, self._settings.max_speculating_seqs
        if max_requests:
            drafter = Drafter(max_requests=max_requests, cost=CUDA_COST if self._runner.has_graphs else CPU_COST)
        processor = OutputProcessor(scheduler, eos_ids=self.eos_ids, drafter=drafter)
        processor.read_routes = self._runner.read_routes
        if self._runner.has_graphs:
            return processor, AsyncStepper(self._runner, processor, burst_length=self._settings.decode_block)
        return processor, SyncStepper(self._runner, processor)

    def _run_guarded(self, work: Callable[[], None]) -> None:
        """Run work on the device under the engine's own torch modes; an error fails every request in the engine."""
        try:
            with default_modes(num_threads=self._num_cpu_threads, device=self._runner.model.device):
                work()
        except Exception as error:  # noqa: BLE001
            self._receive_requests()
            self._output_processor.fail_all(
                explain_device_error(error, work="a step of the engine", advice=MEMORY_ADVICE), error
            )
            # the scheduler may have been left with half a step: requests without their blocks, or a burst in flight
            failed, (self._output_processor, self._stepper) = self._output_processor, self._build_stepper()
            self._output_processor.continue_from(failed)

    def _step(self) -> None:
        self._receive_requests()
        while self._cancelled:
            state = self._output_processor.states.get(self._cancelled.popleft())
            if state is not None:
                self._output_processor.finish(state, "cancelled")
        self._stepper.step()

    def _receive_requests(self) -> None:
        while self._inbox:
            self._output_processor.add_request(self._inbox.popleft())

    def _schedule_delivery(self) -> None:
        """Let the event loop deliver the output since the last call."""
        output = self._output_processor.take_output()
        if not output or self._loop is None or self._loop.is_closed():
            return
        self._undelivered.append(output)
        self._loop.call_soon(self._deliver)

    def _deliver_own(self) -> None:
        """Deliver at once, in a call from the event loop's thread: callers then receive tokens while `policy_version`
        is theirs."""
        self._schedule_delivery()
        if self._loop is not None and not self._loop.is_closed():
            self._deliver()

    def _deliver(self) -> None:
        """Runs in the event loop: deliver output, and admit one waiting caller per freed queue place."""
        while self._undelivered:
            output = self._undelivered.popleft()
            self._cancelled.extend(deliver_output(output))
            for _ in range(output.num_dequeued):
                self._queue_places.release()
