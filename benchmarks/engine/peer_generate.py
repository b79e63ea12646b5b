"""Transformers' samplers as peers: `generate` on one batch, and continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import GenerationConfig, PreTrainedModel

PAD_ID = 0


@contextmanager
def plain_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Temporarily replace Tunesmith's attention by one of transformers."""
    ours = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def run_generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Sample one batch of prompts of equal length at temperature 1."""
    ids = torch.tensor(prompts, device=model.device)
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=num_tokens, min_new_tokens=num_tokens,
        eos_token_id=None, pad_token_id=PAD_ID,
    )  # fmt: skip
    with plain_attention(model, "sdpa"), torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert output.shape[1] == len(prompts[0]) + num_tokens


def run_continuous_batching(model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Sample with transformers' `generate_batch`."""
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=PAD_ID
    )
    with plain_attention(model, "sdpa"):
        outputs = model.generate_batch(
            [list(prompt) for prompt in prompts], generation_config=config, progress_bar=False
        )
    lengths = {len(output.generated_tokens) for output in outputs.values()}
    assert lengths == {num_tokens}, lengths
