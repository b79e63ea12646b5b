"""The engine on a vLLM process: requests, versions, pause and resume, and the weights of each version.

`pause` aborts what vLLM is sampling and keeps the tokens sampled so far; `resume` pushes the policy's weights if they
have changed, drops vLLM's cache and submits the unfinished requests again, with their tokens as part of the prompt. So
each token has the version of the weights that sampled it, and no keys and values of other weights are read. vLLM
samples in its own time and its numbers depend on its batches, so runs are not reproducible.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.config import EngineSection
from tunesmith.engine.core.base_engine import BaseEngine
from tunesmith.engine.core.output_processor import RequestState, StepOutput, deliver_output
from tunesmith.engine.vllm.process import Connection, VllmProcess
from tunesmith.engine.vllm.support import build_parameters, check_parameters
from tunesmith.engine.vllm.weights import GatherWeights, push_weights, save_config
from tunesmith.errors import EngineError
from tunesmith.types import MAX_TOP_LOGPROBS, Completion, OnTokens, Sampling, StopReason, TokenDetails

PAUSE_TIMEOUT_S = 120.0
PUSH_TIMEOUT_S = 900.0
CPU_CACHE_GIB = 2.0
RECEIVER = Path(__file__).parent / "receiver.py"
RECEIVER_MODULE = "tunesmith_weight_receiver"
"""Name under which vLLM's workers import it."""


class VllmEngine(BaseEngine):
    """Requests to a vLLM process that samples from a copy of the model; implements `tunesmith.types.Engine`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: EngineSection,
        *,
        max_model_len: int,
        gather: GatherWeights | None = None,
    ) -> None:
        """Start vLLM and wait until it is ready. Stop strings need a tokenizer; `gather` yields the weights of a model
        that is sharded over ranks."""
        super().__init__(model, tokenizer, max_model_len=max_model_len)
        self._model, self._settings, self._gather = model, settings, gather
        self._devices = list_devices(model.device, settings)
        self._states: dict[int, RequestState] = {}
        """Requests that are not complete, by id."""
        self._submitted: set[int] = set()
        """Requests for which vLLM has not sent its last event."""
        self._output = StepOutput()
        self._counts: Counter[str] = Counter()
        self.policy_version = 0
        self._pushed_version: int | None = None
        self._is_paused = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._weight_push_s = 0.0
        self._process = start_process(model, settings, max_model_len, devices=self._devices)
        self._finalizer = weakref.finalize(self, self._process.stop)
        self._connection = Connection(
            self._process.socket,
            on_event=self._receive,
            on_end=self._fail_all,
            explain_end=self._process.explain_end,
        )
        self._start()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion; see `tunesmith.types.Engine`. vLLM admits requests in order of arrival."""
        self._check(prompt_ids, sampling)
        check_parameters(sampling, eos_ids=self.eos_ids)
        self._bind_loop()
        async with self._places:
            return await self._run(self._build_state(prompt_ids, sampling, on_tokens=on_tokens, order=order))

    def pause(self) -> None:
        """Abort what vLLM samples, once it has sent the tokens so far; unfinished requests wait for `resume`."""
        if self._is_paused:
            return
        self._is_paused = True
        if self._submitted:
            # until the last event of each request: tokens that vLLM has sent already are of the present version
            self._connection.send({"op": "abort", "ids": sorted(self._submitted)})
            self._connection.wait_until(lambda: not self._submitted, work="pause", timeout_s=PAUSE_TIMEOUT_S)
        self._measure()

    def resume(self, policy_version: int) -> None:
        """Push the model's weights if the version is new, drop cached keys and values, and go on sampling."""
        self.pause()
        if policy_version != self._pushed_version:
            self._push()
        if not self._connection.call("reset_cache", timeout_s=PAUSE_TIMEOUT_S):
            raise EngineError("vLLM still uses cached keys and values of older weights after all requests were aborted")
        self.policy_version = self._pushed_version = policy_version
        self._is_paused = False
        for state in list(self._states.values()):
            self._submit(state)
        self._measure()

    def compute_stats(self) -> dict[str, float]:
        """Metrics since the last call."""
        names = ("requests", "sampled_tokens", "prefill_tokens", "cached_tokens")
        stats = {f"engine/num_{name}": float(self._counts[name]) for name in names}
        stats |= self._usage.take() | {"perf/weight_push_s": self._weight_push_s}
        self._counts.clear()
        self._weight_push_s = 0.0
        return stats

    def close(self) -> None:
        """Stop vLLM."""
        self._connection.close()
        self._finalizer()

    def _start(self) -> None:
        try:
            self._connection.wait_for_reply(0, work="start", timeout_s=self._settings.vllm.start_timeout_s)
        except EngineError as error:
            message = self._process.explain_start(str(error))
            self.close()
            raise EngineError(message) from None

    def _push(self) -> None:
        started_at = time.perf_counter()
        devices = self._devices if self._settings.vllm.weight_transfer == "memory" else None
        folder = self._process.folder
        push_weights(self._connection, self._model, devices, folder, timeout_s=PUSH_TIMEOUT_S, gather=self._gather)
        self._weight_push_s += time.perf_counter() - started_at

    async def _run(self, state: RequestState) -> Completion:
        request_id = state.request.request_id
        if not self._connection.is_open:
            raise EngineError(self._process.explain_end())
        if self._pushed_version is None:
            self.resume(self.policy_version)
        self._states[request_id] = state
        if not self._is_paused:
            self._submit(state)
        try:
            return await state.future
        finally:
            self._states.pop(request_id, None)
            if request_id in self._submitted and self._connection.is_open:
                self._connection.send({"op": "abort", "ids": [request_id]})

    def _submit(self, state: RequestState) -> None:
        request = state.request
        distribution = request.sampling.distribution
        # these penalties depend on which tokens the reply has, and the tokens so far become part of the prompt
        if request.num_sampled and (distribution.presence_penalty or distribution.frequency_penalty):
            self._fail(state, "engine.kind=vllm cannot go on with presence_penalty or frequency_penalty after a pause")
            return
        parameters = build_parameters(request, eos_ids=self.eos_ids, has_seed=self._settings.vllm.has_seeds)
        self._submitted.add(request.request_id)
        self._counts["requests"] += not request.num_sampled
        self._counts["prefill_tokens"] += len(request.token_ids)
        self._measure()
        self._connection.send(
            {"op": "generate", "id": request.request_id, "prompt": request.token_ids, "params": parameters}
        )

    def _receive(self, event: dict[str, Any]) -> None:
        """Tokens of a request, or its last event."""
        request_id, finish = event["id"], event.get("finish")
        state = self._states.get(request_id)
        if state is not None and not state.future.done():
            if event.get("ids"):
                self._add_tokens(state, event)
            if finish == "error":
                self._process.has_failed = True
                self._fail(state, f"vLLM failed a request: {event['error']}; its log is {self._process.log_path}")
            elif finish is not None and not self._is_paused and request_id in self._states:
                self._fail(state, f"vLLM ended a request by itself ({finish})")
        if finish is not None:
            self._submitted.discard(request_id)
            cached = event.get("cached", 0)
            self._counts["cached_tokens"] += cached
            self._counts["prefill_tokens"] -= cached
            self._measure()

    def _add_tokens(self, state: RequestState, event: dict[str, Any]) -> None:
        ids, logprobs = event["ids"], event["logprobs"]
        if not all(map(math.isfinite, logprobs)):
            self._fail(state, "vLLM's logprobs are not finite; lower the learning rate, or look for broken weights")
            return
        num_kept, reason = state.stops.find_end(ids)
        details = None
        if "top" in event:
            # most likely first, without tokens that the distribution excludes
            rows = ([(int(token), each) for token, each in row if each > -math.inf] for row in event["top"][:num_kept])
            details = TokenDetails(
                top_logprobs=tuple(tuple(row[: state.request.sampling.top_logprobs]) for row in rows)
            )
        ids, logprobs = ids[:num_kept], logprobs[:num_kept]
        state.request.num_cached_tokens = state.request.num_cached_tokens or event.get("cached")
        state.request.extend(ids, logprobs, self.policy_version, details)
        self._counts["sampled_tokens"] += num_kept
        if state.on_tokens is not None:
            self._deliver(StepOutput(tokens=[(state, ids, logprobs, details)]))
        if reason is not None:
            self._finish(state, reason)

    def _finish(self, state: RequestState, reason: StopReason) -> None:
        self._states.pop(state.request.request_id, None)
        self._deliver(StepOutput(results=[(state, state.request.complete(reason))]))

    def _fail(self, state: RequestState, message: str) -> None:
        self._states.pop(state.request.request_id, None)
        self._deliver(StepOutput(results=[(state, EngineError(message))]))

    def _fail_all(self) -> None:
        """Fail every request, because the process has ended."""
        self._submitted.clear()
        if self._states:
            message = self._process.explain_end()
            for state in list(self._states.values()):
                self._fail(state, message)

    def _deliver(self, output: StepOutput) -> None:
        """Call back in the event loop, once it no longer waits in `pause`."""
        if not self._output and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self._flush)
        self._output.tokens += output.tokens
        self._output.results += output.results

    def _flush(self) -> None:
        output, self._output = self._output, StepOutput()
        deliver_output(output)

    def _bind_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._states and self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("requests of another event loop are in flight; an engine serves one loop at a time")
        if self._submitted:
            self._connection.send({"op": "abort", "ids": sorted(self._submitted)})
        self._states.clear()
        self._output = StepOutput()
        self._loop = loop
        self._places = asyncio.Semaphore(self._settings.max_num_seqs + self._settings.max_waiting)
        self._connection.attach(loop)

    def _measure(self) -> None:
        """Note whether vLLM has requests from now on, or could sample without any."""
        can_sample = not self._is_paused and self._pushed_version is not None
        self._usage.enter("busy" if self._submitted else "idle" if can_sample else None)


def list_devices(own: torch.device, settings: EngineSection) -> list[torch.device] | None:
    """The GPUs that vLLM uses; None on a CPU."""
    if own.type != "cuda":
        return None
    first = torch.cuda.current_device() if own.index is None else own.index
    indices = settings.vllm.devices or range(first, first + settings.tensor_parallel_size)
    return [torch.device("cuda", index) for index in indices]


def start_process(
    model: PreTrainedModel,
    settings: EngineSection,
    max_model_len: int,
    *,
    devices: Sequence[torch.device] | None,
) -> VllmProcess:
    """Start vLLM on the model's architecture; its weights come with the first `resume`."""
    folder = Path(tempfile.mkdtemp(prefix="tunesmith-vllm-"))
    is_cpu = devices is None
    save_config(model, folder, has_own_head=is_cpu)
    shutil.copy(RECEIVER, folder / f"{RECEIVER_MODULE}.py")
    gib = settings.kv_cache_gib or (CPU_CACHE_GIB if is_cpu else None)
    optional = {
        "max_num_batched_tokens": settings.max_batched_tokens,
        "kv_cache_memory_bytes": None if gib is None else int(gib * 2**30),
        "gpu_memory_utilization": None if is_cpu else settings.vllm.gpu_memory_share,
    }
    arguments = {
        "model": str(folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "load_format": "dummy",
        "runner": "generate",
        "worker_extension_cls": f"{RECEIVER_MODULE}.WeightReceiver",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "enable_prefix_caching": settings.has_prefix_cache,
        "stream_interval": settings.decode_block,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.vllm.has_eager,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_TOP_LOGPROBS,
        "disable_log_stats": True,
    }
    arguments |= {name: value for name, value in optional.items() if value is not None} | settings.vllm.args
    return VllmProcess(
        folder,
        arguments,
        python=settings.vllm.python,
        devices=None if devices is None else [device.index for device in devices],
    )


class DistantEngine(BaseEngine):
    """Implements `tunesmith.types.Engine` on a rank that runs no tasks."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, max_model_len: int
    ) -> None:
        super().__init__(model, tokenizer, max_model_len=max_model_len)
        self.policy_version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **options: Any) -> Completion:
        """Raise EngineError: only the first rank samples."""
        raise EngineError("only the first rank samples with vLLM, and this rank was asked to")

    def pause(self) -> None:
        """Nothing to do."""

    def resume(self, policy_version: int) -> None:
        """Note the version."""
        self.policy_version = policy_version

    def compute_stats(self) -> dict[str, float]:
        """No counters."""
        return {}
