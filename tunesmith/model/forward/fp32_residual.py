"""The stream of residuals in float32 where weights have 16 bits.

Each layer adds to the sum of the layers before it. In 16 bits every such sum is rounded, and sampler and trainer, whose
products differ in their last bits, round to different sides. Here the embedding comes out in float32, and the norms,
which alone read the sum, give the weights' type to everything behind them. Hooks do it, so that the sampler, the
trainer and plain calls of a model run the same function; modules, parameters and files stay as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tunesmith.errors import ModelError
from tunesmith.model.adapters.adapter import build_skeleton

FIRST_NORM = "input_layernorm"
"""The child of a decoder layer that reads the residuals before attention does; others add to them after a norm."""


def check_residuals(config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Refuse an architecture whose residuals `widen_residuals` cannot widen, before its weights are read."""
    find_norms(build_skeleton(config, trust_remote_code=trust_remote_code))


def widen_residuals(model: PreTrainedModel) -> None:
    """Keep the residuals of a model of 16 bits in float32; a wider model has such residuals and stays as it is."""
    dtype = model.get_input_embeddings().weight.dtype
    if dtype.itemsize >= torch.float32.itemsize:
        return
    norms = find_norms(model)
    model.get_input_embeddings().register_forward_hook(_widen)
    for norm in norms:
        norm.register_forward_hook(partial(_narrow, dtype))
    for name, module in model.get_decoder().named_children():
        if name.startswith("rotary_emb"):
            module.register_forward_pre_hook(partial(_narrow_sample, dtype))
    _verify(model, norms)


def find_norms(model: PreTrainedModel) -> list[nn.Module]:
    """The norms over hidden states: the last one, then those of the layers, those of queries and keys left out."""
    decoder, size = model.get_decoder(), model.config.get_text_config().hidden_size
    layers = getattr(decoder, "layers", None)
    owners = [decoder, *layers] if isinstance(layers, nn.ModuleList) else []
    norms_of_owner = [[child for child in owner.children() if _is_norm(child, size)] for owner in owners]
    is_first = [_is_norm(getattr(layer, FIRST_NORM, None), size) for layer in owners[1:]]
    if not owners or not all(norms_of_owner) or not all(is_first):
        raise _build_error(model, f"its layers do not each begin with an RMS norm named {FIRST_NORM}")
    return [norm for norms in norms_of_owner for norm in norms]


def _is_norm(module: nn.Module | None, size: int) -> bool:
    """A vector of the hidden size and nothing else; torch's own LayerNorm takes no inputs wider than its weight."""
    if module is None or isinstance(module, nn.LayerNorm):
        return False
    return {name: weight.shape for name, weight in module.named_parameters()} == {"weight": (size,)}


def _widen(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.float()


def _narrow(dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.to(dtype)


def _narrow_sample(dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Angles come on the device and in the type of the first input, of which nothing else is read."""
    sample, *rest = inputs
    return sample.new_empty(0, dtype=dtype), *rest


@torch.no_grad()
def _verify(model: PreTrainedModel, norms: list[nn.Module]) -> None:
    """Refuse a model through which a token does not pass, or in which the last norm reads anything narrower."""
    seen: list[torch.dtype] = []
    witness = norms[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    try:
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    except RuntimeError as error:
        raise _build_error(model, " ".join(str(error).split())[:200]) from error
    finally:
        witness.remove()
    if seen != [torch.float32]:
        raise _build_error(model, "it does not add to them in the type of its embeddings")


def _build_error(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"model.residual_dtype=float32 is not supported for {type(model).__name__} ({reason}); leave it at 'model'"
    )
