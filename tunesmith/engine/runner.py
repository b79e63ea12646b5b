"""One engine step on the model: scheduled tokens in, sampled tokens out.

All tokens of a step go through the unchanged model as one row of ids and positions; only the last token of each request
that samples reaches the head. Owns the key-value cache and, on a CPU, packed weights. Knows no request's history beyond
what its work says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tunesmith.config import EngineSection
from tunesmith.engine.attention import MAX_BATCHED_QUERIES, KVCache, LayerShape, PagedPlan, Span
from tunesmith.engine.block import Block, BlockDecoder, DecodeRow
from tunesmith.engine.packed import PackedLinears
from tunesmith.engine.sampling import Draws, sample_tokens, truncates
from tunesmith.engine.scheduler import Work
from tunesmith.errors import ConfigError, ModelError
from tunesmith.model.attention import CausalPlan, get_layer_index, run_body
from tunesmith.model.logits import compute_logits, verify_model


class Runner:
    """The model, its key-value cache, and how a step runs on them."""

    def __init__(self, model: PreTrainedModel, settings: EngineSection, *, max_model_len: int) -> None:
        verify_model(model)
        self.model = model
        shapes = probe_layers(model)
        self.num_pages = compute_num_pages(shapes, settings, model.dtype)
        has_graphs = model.device.type == "cuda" and settings.cuda_decode != "eager"
        self.cache = KVCache(
            shapes,
            num_pages=self.num_pages + has_graphs,  # graphs write what nobody reads into a page of their own
            page_size=settings.page_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._graphs = _build_graphs(model, self.cache, settings, max_model_len) if has_graphs else None
        self._packed = PackedLinears(model) if settings.has_packed_weights else None
        self._is_stale = True

    def notice_new_weights(self) -> None:
        """The parameters may have changed in place."""
        self._is_stale = True

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> tuple[list[Work], Draws]:
        """Compute the work's tokens; return the work that sampled, and its draws in the same order."""
        work = sorted(work, key=_by_length_then_context)
        plan, ids_1T, positions_1T = self._build_inputs(work)
        sampling, last_tokens = [], []
        num_tokens = 0
        for item in work:
            num_tokens += item.stop - item.start
            if item.samples:
                sampling.append(item)
                last_tokens.append(num_tokens - 1)
        if self._packed is None:
            logits_NV = self._forward(plan, ids_1T, positions_1T, last_tokens)
        else:
            if self._is_stale:
                self._packed.refresh()
            with self._packed.installed():
                logits_NV = self._forward(plan, ids_1T, positions_1T, last_tokens)
        self._is_stale = False
        return sampling, self._sample(sampling, logits_NV)

    def can_decode_block(self, item: Work) -> bool:
        """A graph can decode this request on: one known token is left, and nothing is truncated or biased."""
        if self._graphs is None or item.stop - item.start > 1 or not item.samples:
            return False
        distribution = item.request.sampling.distribution
        return not (truncates(distribution) or distribution.logit_bias)

    @torch.inference_mode()
    def decode_block(self, work: Sequence[Work], *, num_steps: int) -> Block:
        """Decode `num_steps` tokens of each request, whatever they are; the caller finds where each ends."""
        assert self._graphs is not None
        rows = [
            DecodeRow(
                token_id=item.request.token_ids[-1],
                position=item.start,
                pages=item.request.pages,
                temperature=item.request.sampling.distribution.temperature,
                seed=item.request.sampling.seed,
            )
            for item in work
        ]
        return self._graphs.decode(rows, num_steps=num_steps)

    def _build_inputs(self, work: Sequence[Work]) -> tuple[PagedPlan, Tensor, Tensor]:
        size, device = self.cache.page_size, self.model.device
        ids: list[int] = []
        positions: list[int] = []
        token_pages: list[int] = []
        spans = []
        for item in work:
            request = item.request
            spans.append(Span(len(ids), item.start, item.stop, request.pages))
            ids += request.token_ids[item.start : item.stop]
            positions += range(item.start, item.stop)
            token_pages += [request.pages[position // size] for position in range(item.start, item.stop)]
        positions_T = torch.tensor(positions, device=device)
        plan = PagedPlan(self.cache, spans, torch.tensor(token_pages, device=device), positions_T % size)
        return plan, torch.tensor(ids, device=device)[None], positions_T[None]

    def _forward(self, plan: PagedPlan, ids_1T: Tensor, positions_1T: Tensor, last_tokens: list[int]) -> Tensor:
        hidden_TC = run_body(self.model, ids_1T, positions_1T, plan)[0]
        if len(last_tokens) < len(hidden_TC):
            hidden_TC = hidden_TC[torch.tensor(last_tokens, dtype=torch.long, device=hidden_TC.device)]
        return compute_logits(self.model, hidden_TC).float()

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


def _build_graphs(model: PreTrainedModel, cache: KVCache, settings: EngineSection, max_model_len: int) -> BlockDecoder:
    from tunesmith.engine.graphs import DecodeGraphs  # needs Triton, which is there on CUDA machines only

    return DecodeGraphs(
        model,
        cache,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        is_compiled=settings.cuda_decode == "compiled",
    )


def _by_length_then_context(item: Work) -> tuple[bool, int]:
    """Requests with few new tokens first, by context, as `PagedPlan` wants them."""
    return item.stop - item.start > MAX_BATCHED_QUERIES, item.stop


class _ShapePlan(CausalPlan):
    """Notes the sizes of each layer's keys and values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__([1], device)
        self.shape_of_layer: dict[int, LayerShape] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        if key.shape != value.shape:
            raise ModelError(f"{type(module).__name__}: keys and values of different sizes are not supported")
        self.shape_of_layer[get_layer_index(module)] = LayerShape(key.shape[1], key.shape[3])
        return super().attend(module, query, key, value, **kwargs)


@torch.no_grad()
def probe_layers(model: PreTrainedModel) -> list[LayerShape]:
    """Sizes of every layer's keys and values, seen in a forward of one token."""
    plan = _ShapePlan(model.device)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    run_body(model, token, token, plan)
    return [plan.shape_of_layer[layer] for layer in sorted(plan.shape_of_layer)]


def compute_num_pages(shapes: Sequence[LayerShape], settings: EngineSection, dtype: torch.dtype) -> int:
    """Pages of the cache that the settings pay for."""
    if settings.kv_cache_tokens is not None:
        return -(-settings.kv_cache_tokens // settings.page_size)
    num_values = sum(2 * shape.num_kv_heads * shape.head_size for shape in shapes)
    num_pages = int(settings.kv_cache_gib * 2**30) // (num_values * dtype.itemsize * settings.page_size)
    if num_pages == 0:
        raise ConfigError(f"kv_cache_gib={settings.kv_cache_gib} does not hold one page; raise it")
    return num_pages
