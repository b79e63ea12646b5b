"""Runs the model for one engine step: scheduled tokens in, sampled tokens out.

All tokens of a step go through the unchanged model as one row of ids and positions; the head is applied only to the
last token of each request that samples. Owns the KV cache and, on a CPU, the weights in oneDNN's layout. Holds no state
of requests between steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tunesmith.cluster.ranks import count_ranks
from tunesmith.config import EngineSection
from tunesmith.engine.batch.decode_burst import BurstInput
from tunesmith.engine.batch.kv_cache import (
    KVCache,
    LayerShape,
    PagedAttentionPlan,
    SingleRunPlan,
    build_states,
    get_span_order,
    has_single_runs,
    list_slots,
)
from tunesmith.engine.batch.sampler import SamplerOutput, sample_tokens
from tunesmith.engine.core.block_manager import SnapshotPool
from tunesmith.engine.core.request import Request
from tunesmith.engine.core.scheduler import ScheduledChunk
from tunesmith.engine.core.span import Span
from tunesmith.engine.cpu.decoder_trace import trace_decoder
from tunesmith.engine.cpu.layers import CpuLayers
from tunesmith.errors import ConfigError
from tunesmith.grammar.matcher import GrammarCompiler
from tunesmith.model.adapters.adapter import has_adapter
from tunesmith.model.arrays import concatenate_ranges, copy_to_device
from tunesmith.model.experts import find_experts
from tunesmith.model.forward.attention import AttentionPlan, fix_rotary_frequencies, run_body
from tunesmith.model.forward.distribution import LogitAdjustment, TokenContext, build_adjustment
from tunesmith.model.forward.logits import LogitScaling, RecordingPlan, compute_logits, verify_model
from tunesmith.model.forward.recurrence import count_state_bytes, describe_states
from tunesmith.model.memory import GIB, MIN_CACHE_GIB, compute_cache_bytes, count_blocks, count_state_slots

if TYPE_CHECKING:
    from tunesmith.engine.cuda.cuda_graphs import CudaBurstHandle, DecodeGraphs
    from tunesmith.engine.cuda.fp8_weights import Fp8Weights  # needs Triton, which only CUDA machines have

DEFAULT_BATCHED_TOKENS = (4096, 16384)
"""`engine.max_batched_tokens` where it is not set: on a CPU, on other devices."""
FP8_CAPABILITY = (8, 9)
"""Lowest compute capability that multiplies FP8 matrices."""


class ModelRunner:
    """A model and its KV cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: EngineSection,
        *,
        max_model_len: int,
        grammars: GrammarCompiler,
        has_trainer: bool,
    ) -> None:
        """`grammars` computes the masks of requests that have a grammar; `has_trainer`: whether the model is also
        trained on this device, whose memory is then shared."""
        # before the model is verified: rollouts use the frequencies that are fixed here
        fix_rotary_frequencies(model, max_model_len=max_model_len)
        verify_model(model)
        self._grammars = grammars
        self.model = model
        shapes = probe_layers(model)
        fp8 = _build_fp8_weights(model) if settings.weight_format == "fp8" else None  # before memory is measured
        token_bytes = sum(2 * each.num_kv_heads * each.head_size for each in shapes if each) * model.dtype.itemsize
        available, state_bytes = measure_cache_bytes(model, has_trainer=has_trainer), count_state_bytes(model)
        num_slots, available = count_state_slots(settings, state_bytes, available=available)
        self.num_blocks = count_blocks(settings, token_bytes, max_model_len=max_model_len, available=available)
        self.max_batched_tokens = settings.max_batched_tokens or DEFAULT_BATCHED_TOKENS[model.device.type != "cpu"]
        self.has_graphs = model.device.type == "cuda" and settings.cuda_decode != "eager"
        if self.has_graphs and model.dtype.itemsize > 2 and any(find_experts(model)):
            raise ConfigError(
                f"experts in {model.dtype} cannot be captured in CUDA graphs, since their products wait for the host: "
                "set engine.cuda_decode=eager, or model.dtype=bfloat16"
            )
        self.cache = KVCache(
            shapes,
            num_blocks=self.num_blocks + self.has_graphs,  # graphs write padding into a scratch block
            block_size=settings.page_size,
            dtype=model.dtype,
            device=model.device,
            is_head_major=not self.has_graphs,
            states=build_states(describe_states(model), num_slots=num_slots, device=model.device),
        )
        self.slots: dict[str, Any] = {}
        """Arguments of `Scheduler`: slots of recurrent states that belong to no request. One more is for padding."""
        if num_slots:
            first = settings.max_num_seqs + 1
            snapshots = SnapshotPool(range(first + 1, num_slots)) if settings.has_prefix_cache else None
            self.slots = {"empty_slot": first, "snapshots": snapshots}
        self._burst_decoder: DecodeGraphs | None = None
        if self.has_graphs:
            from tunesmith.engine.cuda.cuda_graphs import DecodeGraphs  # needs Triton, which only CUDA machines have

            self._burst_decoder = DecodeGraphs(
                model,
                self.cache,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=max_model_len,
                is_compiled=settings.cuda_decode == "compiled",
                fp8=fp8,
            )
        self._cpu_layers = CpuLayers(model) if settings.has_packed_weights else None
        self._decoder_trace = trace_decoder(model) if model.device.type == "cpu" else None
        self._logit_scaling = LogitScaling.read(model)

    def mark_weights_updated(self) -> None:
        """The parameters may have changed, in place or not."""
        if self._cpu_layers is not None:
            self._cpu_layers.mark_weights_updated()
        if self._burst_decoder is not None:
            self._burst_decoder.refresh()

    @torch.inference_mode()
    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], SamplerOutput]:
        """Compute the chunks; return those that sample, and their tokens in the same order: one for each, and one for
        each token of its draft."""
        # by number of new tokens and context: attention batches neighbors, and pads them to the longest
        chunks = sorted(chunks, key=_get_order)
        sampling = [chunk for chunk in chunks if chunk.has_last_token]
        num_rows = sum(chunk.num_tokens for chunk in chunks)
        with nullcontext() if self._cpu_layers is None else self._cpu_layers.installed(num_rows=num_rows):
            logits_NV = compute_logits(self.model, self._compute_hidden(chunks), scaling=self._logit_scaling).float()
        return sampling, self._sample(sampling, logits_NV)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[ScheduledChunk], Tensor]:
        """Queue the chunks; return those that sample a token, and the hidden states [N, C] to sample from."""
        chunks = sorted(chunks, key=_get_order)
        return [chunk for chunk in chunks if chunk.has_last_token], self._compute_hidden(chunks)

    def can_decode_in_burst(self, request: Request) -> bool:
        """The device samples this request's tokens by itself: without bias, penalties, bans and top logprobs."""
        sampling = request.sampling
        is_plain = not (request.depends_on_context or sampling.distribution.logit_bias or sampling.top_logprobs)
        return is_plain and self._burst_decoder is not None

    def launch_burst(
        self, requests: Sequence[Request], rows: BurstInput, *, num_new: int, num_steps: int
    ) -> CudaBurstHandle:
        """Queue `num_steps` decode steps of each request; the caller finds out where each request ends.

        The last `num_new` requests were not in the previous burst.
        """
        assert self._burst_decoder is not None
        self._burst_decoder.input_batch.update(requests, num_new=num_new)
        return self._burst_decoder.launch(rows, num_steps=num_steps)

    def read_routes(self, request: Request) -> Any:
        """As `Completion.routes`."""
        if self.cache.routes is None or not request.blocks:
            return None
        position_T, size = np.arange(len(request.token_ids) - 1), self.cache.block_size
        return self.cache.routes.read(np.array(request.blocks)[position_T // size] * size + position_T % size)

    def _compute_hidden(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Hidden states [N, C] of the last tokens and drafts of the chunks that sample, in order."""
        ids, spans, last_tokens = array("q"), [], list[int]()
        for chunk in chunks:
            runs = () if self._burst_decoder is not None else chunk.request.find_runs()
            assert chunk.request.slot is not None
            states = (chunk.source, chunk.request.slot, chunk.snapshots)
            stop = chunk.start + chunk.num_tokens
            spans.append(Span(len(ids), chunk.start, stop, chunk.request.blocks, runs, *states))
            ids.fromlist(chunk.request.token_ids[chunk.start : chunk.stop])
            ids.extend(chunk.draft)
            if chunk.has_last_token:
                last_tokens += range(len(ids) - len(chunk.draft) - 1, len(ids))
        has_own_states = all(chunk.has_own_state for chunk in chunks)
        is_decode = len(last_tokens) == len(ids) == len(chunks)
        num_tokens, device, hidden_NC = len(ids), self.cache.attended_keys.device, None
        if self._burst_decoder is not None and is_decode and has_own_states:
            hidden_NC = self._burst_decoder.compute_hidden(spans, ids)
        elif self._burst_decoder is not None:
            hidden_NC = self._burst_decoder.prefill(spans, np.frombuffer(ids, dtype=np.int64), last_tokens)
        if hidden_NC is None:
            positions = np.array([chunk.start for chunk in chunks])
            if num_tokens > len(chunks):
                positions = concatenate_ranges(positions, np.array([chunk.num_tokens for chunk in chunks]))
            ids_T = copy_to_device(np.frombuffer(ids, dtype=np.int64), device)
            positions_T = copy_to_device(positions, device)
            hidden_NC = self._run_body(ids_T[None], positions_T[None], self._build_plan(spans))[0]
            if len(last_tokens) < num_tokens:
                hidden_NC = hidden_NC[copy_to_device(np.array(last_tokens, dtype=np.int64), device)]
        if self.cache.routes is not None:
            self.cache.routes.store(copy_to_device(list_slots(spans, self.cache.block_size), device))
        return hidden_NC

    def _build_plan(self, spans: Sequence[Span]) -> AttentionPlan:
        if self._burst_decoder is None:
            device = self.cache.attended_keys.device  # `model.device` searches the parameters
            if device.type == "cpu" and has_single_runs(spans):
                return SingleRunPlan(self.cache, spans)
            return PagedAttentionPlan(self.cache, spans, device)
        return self._burst_decoder.build_prefill_plan(spans)

    def _run_body(self, ids_1T: Tensor, positions_1T: Tensor, plan: AttentionPlan) -> Tensor:
        if self._burst_decoder is None:
            return run_body(self.model, ids_1T, positions_1T, plan, decoder=self._decoder_trace)
        with self._burst_decoder.installed():
            return run_body(self.model, ids_1T, positions_1T, plan)

    def _sample(self, chunks: Sequence[ScheduledChunk], logits_NV: Tensor) -> SamplerOutput:
        if not chunks:
            return SamplerOutput([], [])
        rows = [(chunk.request, chunk.stop + index) for chunk in chunks for index in range(1 + len(chunk.draft))]
        samplings = [request.sampling for request, _ in rows]
        return sample_tokens(
            logits_NV,
            [sampling.distribution for sampling in samplings],
            [sampling.seed for sampling in samplings],
            [position for _, position in rows],
            has_entropies=any(sampling.return_entropy for sampling in samplings),
            num_top=max(sampling.top_logprobs for sampling in samplings),
            adjustment=self._build_adjustment([request for request, _ in rows], logits_NV.device),
        )

    def _build_adjustment(self, requests: Sequence[Request], device: torch.device) -> LogitAdjustment | None:
        """Penalties and bans of the next token of each request."""
        if not any(request.depends_on_context for request in requests):
            return None
        matchers = {id(each): each.token_matcher for each in requests if each.token_matcher is not None}
        masks = {}
        if matchers:
            masks = dict(zip(matchers, self._grammars.fill_masks(list(matchers.values())), strict=True))
        contexts = [
            TokenContext(
                distribution=request.sampling.distribution,
                prompt_ids=request.prompt_ids,
                output_ids=request.token_ids[len(request.prompt_ids) :],
                num_outputs=len(request.token_ids) - len(request.prompt_ids),
                token_mask=masks.get(id(request)),
            )
            for request in requests
        ]
        return build_adjustment(contexts, device)


def _build_fp8_weights(model: PreTrainedModel) -> Fp8Weights:
    check_fp8_device(model.device)
    if has_adapter(model) or getattr(model, "is_quantized", False) or model.dtype.itemsize != 2:
        raise ConfigError(
            "engine.weight_format=fp8 copies whole 16-bit weights: leave it out with model.lora and float32 weights"
        )
    from tunesmith.engine.cuda.fp8_weights import Fp8Weights  # needs Triton, which only CUDA machines have

    return Fp8Weights(model)


def check_fp8_device(device: torch.device) -> None:
    """Raise unless the device multiplies FP8 matrices."""
    if device.type != "cuda":
        raise ConfigError(f"engine.weight_format=fp8 needs a GPU, and model.device is {device.type}: leave it out")
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"engine.weight_format=fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: leave it out"
        )


def _get_order(chunk: ScheduledChunk) -> tuple[int, int]:
    return get_span_order(chunk.start, chunk.start + chunk.num_tokens)


@torch.no_grad()
def probe_layers(model: PreTrainedModel) -> list[LayerShape | None]:
    """Sizes of every layer's keys and values, recorded in a forward of one token; None for recurrent layers."""
    plan = RecordingPlan([1], model.device)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    run_body(model, token, token, plan)
    shapes = {layer: LayerShape(*heads) for layer, heads in plan.heads_of_layer.items()}
    return [
        shapes.get(layer) for layer in range(max(*shapes, model.config.get_text_config().num_hidden_layers - 1) + 1)
    ]


def measure_cache_bytes(model: PreTrainedModel, *, has_trainer: bool) -> int:
    """Bytes for the KV cache on the model's device."""
    if model.device.type == "cpu":
        return int(MIN_CACHE_GIB * GIB)
    free, total = torch.cuda.mem_get_info(model.device)
    num_trained = sum(each.numel() for each in model.parameters() if each.requires_grad) if has_trainer else 0
    return compute_cache_bytes(free=free, total=total, num_trained=num_trained, num_ranks=count_ranks())
