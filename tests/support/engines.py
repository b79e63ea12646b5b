"""Engines with tiny models, and an independent forward to compare their output with."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from fakes import build_chat_tokenizer
from tiny_models import build_tiny
from tunesmith.config import EngineSection
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.types import Completion, Distribution, Sampling

TOKENIZER = build_chat_tokenizer("{{ messages }}")
TOKENIZER.eos_token = None  # so that completions end by length
GREEDY = Distribution(temperature=0)


def build_engine(
    model: PreTrainedModel | str = "llama", *, max_model_len: int = 128, **settings: object
) -> LocalEngine:
    """An engine with small KV-cache blocks on a copy of the tiny model."""
    if isinstance(model, str):
        model = copy.deepcopy(build_tiny(model))
        use_plan_attention(model)
    section = EngineSection(**({"page_size": 4, "kv_cache_tokens": 4000} | settings))
    return LocalEngine(model, TOKENIZER, section, max_model_len=max_model_len)


def build_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (length,), generator=generator).tolist() for length in lengths]


def generate_all(engine: LocalEngine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
    """Sample all prompts concurrently, each with its index as the seed."""

    async def run() -> list[Completion]:
        samplings = [dataclasses.replace(sampling, seed=index) for index in range(len(prompts))]
        return await asyncio.gather(*map(engine.generate, prompts, samplings))

    return run_lockstep(run())


@torch.no_grad()
def compute_reference_logits(model: PreTrainedModel, prompt: Sequence[int], sampled: Sequence[int]) -> torch.Tensor:
    """Logits [N, V] of the sampled tokens' positions, from one plain forward."""
    return model(input_ids=torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
