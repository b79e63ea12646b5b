"""One engine step on the model: scheduled tokens in, sampled tokens out.

All tokens of a step go through the unchanged model as one row of ids and positions; only the last token of each request
that samples reaches the head. Owns the key-value cache and, on a CPU, packed weights. Knows no request's history beyond
what its work says.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.config import EngineSection
from tunesmith.engine.batch.arrays import join_ranges, send
from tunesmith.engine.batch.decode_burst import BlockDecoder, BlockRows, Ticket
from tunesmith.engine.batch.kv_cache import KVCache, LayerShape, PagedPlan, get_span_order
from tunesmith.engine.batch.sampler import Draws, sample_tokens
from tunesmith.engine.core.request import Request
from tunesmith.engine.core.scheduler import Work
from tunesmith.engine.core.span import Span
from tunesmith.engine.cpu.onednn_linear import PackedLinears
from tunesmith.errors import ConfigError, ModelError
from tunesmith.model.forward.attention import AttentionOptions, AttentionPlan, CausalPlan, get_layer_index, run_body
from tunesmith.model.forward.logits import compute_logits, verify_model

DEFAULT_BATCHED_TOKENS = (4096, 16384)
"""Most tokens of one forward where the settings leave it open, on a CPU and elsewhere."""
LEAST_CACHE_GIB = 2.0
"""Memory of the key-value cache where the settings leave it open: all on a CPU, the least on a GPU."""
TRAINED_BYTES = 16
"""The trainer's, for each parameter that it trains: float32 weight and moments, a gradient, scratch."""
WORKING_SHARE = 0.3
"""Of the device's memory, left to activations and logits."""
CACHE_SHARE = 0.5
"""Of what is left then; the rest is for other models' caches."""


class Runner:
    """The model, its key-value cache, and how a step runs on them."""

    def __init__(self, model: PreTrainedModel, settings: EngineSection, *, max_model_len: int) -> None:
        verify_model(model)
        self.model = model
        shapes = probe_layers(model)
        self.num_pages = count_pages(shapes, settings, model, max_model_len=max_model_len)
        self.max_batched_tokens = settings.max_batched_tokens or DEFAULT_BATCHED_TOKENS[model.device.type != "cpu"]
        self.has_graphs = model.device.type == "cuda" and settings.cuda_decode != "eager"
        self.cache = KVCache(
            shapes,
            num_pages=self.num_pages + self.has_graphs,  # graphs write what nobody reads into a page of their own
            page_size=settings.page_size,
            dtype=model.dtype,
            device=model.device,
            is_head_major=not self.has_graphs,
        )
        self._blocks = _build_blocks(model, self.cache, settings, max_model_len) if self.has_graphs else None
        self._packed = PackedLinears(model) if settings.has_packed_weights else None
        self._is_stale = True

    def notice_new_weights(self) -> None:
        """The parameters may have changed in place."""
        self._is_stale = True
        if self._blocks is not None:
            self._blocks.refresh()

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> tuple[list[Work], Draws]:
        """Compute the work's tokens; return the work that sampled, and its draws in the same order."""
        work = sorted(work, key=_get_order)
        sampling = [item for item in work if item.samples]
        if self._packed is None:
            logits_NV = compute_logits(self.model, self._compute_hidden(work)).float()
        else:
            if self._is_stale:
                self._packed.refresh()
            with self._packed.installed():
                logits_NV = compute_logits(self.model, self._compute_hidden(work)).float()
        self._is_stale = False
        return sampling, self._sample(sampling, logits_NV)

    @torch.inference_mode()
    def prefill(self, work: Sequence[Work]) -> tuple[list[Work], Tensor]:
        """Queue the work's tokens; return the work that samples, and hidden states [N, C] to draw its tokens from."""
        work = sorted(work, key=_get_order)
        return [item for item in work if item.samples], self._compute_hidden(work)

    def can_decode_block(self, request: Request) -> bool:
        """A graph can decode this request: its distribution is one that the device draws from by itself."""
        return self._blocks is not None and not request.sampling.distribution.logit_bias

    def launch_block(self, requests: Sequence[Request], rows: BlockRows, *, num_new: int, num_steps: int) -> Ticket:
        """Queue `num_steps` tokens of each request, whatever they are; the caller finds where each ends.

        The last `num_new` requests were not in the block before.
        """
        assert self._blocks is not None
        self._blocks.slots.update(requests, num_new=num_new)
        return self._blocks.launch(rows, num_steps=num_steps)

    def _compute_hidden(self, work: Sequence[Work]) -> Tensor:
        """Hidden states [N, C] of the last tokens of the work that samples, in order."""
        ids, spans, last_tokens = array("q"), [], []
        for item in work:
            runs = () if self._blocks is not None else item.request.find_runs()
            spans.append(Span(len(ids), item.start, item.stop, item.request.pages, runs))
            ids.fromlist(item.request.token_ids[item.start : item.stop])
            if item.samples:
                last_tokens.append(len(ids) - 1)
        num_tokens, device, plan = len(ids), self.model.device, self._build_plan(spans)
        starts, stops = np.array([item.start for item in work]), np.array([item.stop for item in work])
        ids_T, positions_T, last_N = (
            send(numbers, device)
            for numbers in (
                np.frombuffer(ids, dtype=np.int64),
                join_ranges(starts, stops - starts),
                np.array(last_tokens, dtype=np.int64),
            )
        )
        hidden_TC = self._run_body(ids_T[None], positions_T[None], plan)[0]
        return hidden_TC if len(last_tokens) == num_tokens else hidden_TC[last_N]

    def _build_plan(self, spans: Sequence[Span]) -> AttentionPlan:
        if self._blocks is None:
            return PagedPlan(self.cache, spans, self.model.device)
        return self._blocks.build_prefill_plan(spans)

    def _run_body(self, ids_1T: Tensor, positions_1T: Tensor, plan: AttentionPlan) -> Tensor:
        if self._blocks is None:
            return run_body(self.model, ids_1T, positions_1T, plan)
        with self._blocks.installed():
            return run_body(self.model, ids_1T, positions_1T, plan)

    def _sample(self, work: Sequence[Work], logits_NV: Tensor) -> Draws:
        if not work:
            return Draws([], [], [])
        samplings = [item.request.sampling for item in work]
        return sample_tokens(
            logits_NV,
            [sampling.distribution for sampling in samplings],
            [sampling.seed for sampling in samplings],
            [item.stop for item in work],
        )


def _build_blocks(model: PreTrainedModel, cache: KVCache, settings: EngineSection, max_model_len: int) -> BlockDecoder:
    from tunesmith.engine.cuda.cuda_graphs import build_graphs  # needs Triton, which is there on CUDA machines only

    return build_graphs(
        model,
        cache,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        is_compiled=settings.cuda_decode == "compiled",
    )


def _get_order(item: Work) -> tuple[int, int]:
    return get_span_order(item.start, item.stop)


class _ShapePlan(CausalPlan):
    """Notes the sizes of each layer's keys and values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([1], device)
        self.shape_of_layer: dict[int, LayerShape] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        if key.shape != value.shape:
            raise ModelError(f"{type(module).__name__}: keys and values of different sizes are not supported")
        self.shape_of_layer[get_layer_index(module)] = LayerShape(key.shape[1], key.shape[3])
        return super().attend(module, query, key, value, options)


@torch.no_grad()
def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Sizes of every layer's keys and values, seen in a forward of one token."""
    plan = _ShapePlan(model.device)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    run_body(model, token, token, plan)
    return [plan.shape_of_layer[layer] for layer in sorted(plan.shape_of_layer)]


def count_pages(
    shapes: Sequence[LayerShape], settings: EngineSection, model: PreTrainedModel, *, max_model_len: int
) -> int:
    """Pages of the cache that the settings pay for, or that the device has room for."""
    if settings.kv_cache_tokens is not None:
        return -(-settings.kv_cache_tokens // settings.page_size)
    num_values = sum(2 * shape.num_kv_heads * shape.head_size for shape in shapes)
    page_bytes = num_values * model.dtype.itemsize * settings.page_size
    if settings.kv_cache_gib is not None:
        num_bytes = int(settings.kv_cache_gib * 2**30)
    elif model.device.type == "cpu":
        num_bytes = int(LEAST_CACHE_GIB * 2**30)
    else:
        num_bytes = measure_cache_room(model)
    most_tokens = settings.max_num_seqs * (max_model_len + 4 * settings.page_size)
    num_pages = num_bytes // page_bytes
    if settings.kv_cache_gib is None:
        num_pages = min(num_pages, -(-most_tokens // settings.page_size))
    if num_pages == 0:
        raise ConfigError(
            f"there is no room for one page of the key-value cache ({page_bytes} bytes): kv_cache_gib="
            f"{settings.kv_cache_gib}; raise it, or free memory of the device"
        )
    return num_pages


def measure_cache_room(model: PreTrainedModel) -> int:
    """Bytes of memory that training leaves: what is free, less the trainer's states and a share to work in."""
    free, total = torch.cuda.mem_get_info(model.device)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    left = free - TRAINED_BYTES * num_trained - WORKING_SHARE * total
    return max(int(CACHE_SHARE * left), int(LEAST_CACHE_GIB * 2**30))
