"""The tiny models as the trainer takes them: new for each test, in a type of choice, following plans."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tiny_models import CONFIGS
from tunesmith.model.attention import use_plan_attention


def build_trainable(
    name: str = "llama", *, is_tied: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> PreTrainedModel:
    """Equal arguments give equal models."""
    config = copy.deepcopy(CONFIGS[name])
    config.tie_word_embeddings = is_tied
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    use_plan_attention(model)
    if dtype == torch.float64:
        _widen_norms(model)
    return model.to(dtype).eval()


def _widen_norms(model: PreTrainedModel) -> None:
    """Norms in the style of Llama compute in float32 whatever they are given; here they shall not round."""
    for name, module in list(model.named_modules()):
        if name and hasattr(module, "variance_epsilon"):
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon, dtype=torch.float64)
            norm.weight.data.copy_(module.weight.data)
            model.set_submodule(name, norm)
