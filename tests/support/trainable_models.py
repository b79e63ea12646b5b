"""Tiny models for the trainer: new for each test, with plan attention, in a chosen dtype."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sample_spans import build_spans
from tiny_models import CONFIGS, get_config, iter_weights
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.forward.fp32_residual import use_fp32_residual
from tunesmith.model.towers import find_auto_class, train_all_weights
from tunesmith.types import Completion, Distribution, Sample


def build_trainable(
    name: str = "llama", *, is_tied: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0,
    num_layers: int = 3,
) -> PreTrainedModel:  # fmt: skip
    """Equal arguments give equal models."""
    prototype = _build_prototype(name, is_tied, dtype, seed, num_layers)
    return copy.deepcopy(prototype)  # in half the time of another initialization


def build_shallow(**options: Any) -> PreTrainedModel:
    """The model of `build_trainable` with one layer, where the subject is the loss."""
    return build_trainable(num_layers=1, **options)


@functools.cache
def build_frozen(seed: int) -> PreTrainedModel:
    """One model for all tests: a reference or a teacher, which no test trains."""
    return build_shallow(seed=seed)


@functools.cache
def _build_prototype(name: str, is_tied: bool, dtype: torch.dtype, seed: int, num_layers: int) -> PreTrainedModel:
    config = get_config(name)
    if num_layers != config.get_text_config().num_hidden_layers:
        config.num_hidden_layers = num_layers
    config.tie_word_embeddings = is_tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = find_auto_class(config).from_config(config, dtype=torch.float32)
        for weight in iter_weights(model):
            nn.init.normal_(weight, std=0.2)
    use_plan_attention(model)
    if dtype == torch.float64:
        _widen_norms(model)
    return train_all_weights(model.to(dtype).eval())


def build_deep(
    name: str = "llama", *, has_fp32_residual: bool = False, seed: int = 0, num_layers: int = 16
) -> PreTrainedModel:
    """A bfloat16 model of many layers with small residual updates; equal weights for both residual types."""
    config = CONFIGS[name]
    config.num_hidden_layers, config.hidden_size, config.initializer_range = num_layers, 64, 0.03
    if hasattr(config, "head_dim"):
        config.head_dim = 16
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * num_layers)[:num_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    nn.init.constant_(model.get_decoder().norm.weight, 8.0)
    use_plan_attention(model)
    if has_fp32_residual:
        use_fp32_residual(model)
    return model


@torch.no_grad()
def read_residual_types(decoder: nn.Module) -> set[torch.dtype]:
    """Dtypes of the inputs of the layers and the final norm, in a forward of a few tokens."""
    seen: set[torch.dtype] = set()
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: seen.add(inputs[0].dtype))
        for module in (*decoder.layers, decoder.norm)
    ]
    decoder(input_ids=torch.arange(3)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return seen


class GatedNorm(nn.RMSNorm):
    def forward(self, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * nn.functional.silu(gate)


def _widen_norms(model: PreTrainedModel) -> None:
    """Replace norms that always compute in float32 by float64 ones."""
    for name, module in list(model.named_modules()):
        kind = type(module).__name__
        if name and kind.endswith(("RMSNorm", "RMSNormGated")) and hasattr(module, "weight"):
            build = GatedNorm if kind.endswith("Gated") else nn.RMSNorm
            epsilon = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
            norm = build(module.weight.shape, eps=epsilon, dtype=torch.float64)
            is_centered = kind.startswith(("Qwen3_5", "Qwen3Next")) and build is nn.RMSNorm  # around one
            norm.weight.data.copy_(module.weight.data + is_centered)
            model.set_submodule(name, norm)


def build_answered(prompts: list[list[int]], answers: list[Completion]) -> list[Sample]:
    """Samples from prompts and completions, each in its own group; advantages alternate."""
    samples = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        mask = [False] * len(prompt) + [True] * len(answer.sampled_ids)
        samples.append(
            Sample(
                token_ids=(*prompt, *answer.sampled_ids), is_sampled=tuple(mask),
                logprobs=(*[0.0] * len(prompt), *answer.logprobs),
                advantages=tuple((1.0 if index % 2 else -1.0) if m else 0.0 for m in mask),
                policy_versions=tuple(0 if m else None for m in mask),
                distribution_spans=build_spans([Distribution() if m else None for m in mask]),
                group_index=index, trajectory_index=index,
            )
        )  # fmt: skip
    return samples
