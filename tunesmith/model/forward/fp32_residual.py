"""A float32 residual stream in models with 16-bit weights (`model.residual_dtype=float32`).

Each layer adds its output to the residual stream. In 16 bits every such sum is rounded, and engine and trainer, whose
products differ in their last bits, round differently. Here the embedding's output is cast to float32, and each norm,
the only reader of the residual stream, casts its output to the weights' dtype. Forward hooks do both, so engine,
trainer and plain calls of the model compute the same function; modules, parameters and files do not change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tunesmith.errors import ModelError
from tunesmith.model.adapters.adapter import build_meta_model

FIRST_NORM = "input_layernorm"
"""Name of a pre-norm layer's first norm. Post-norm layers, which normalize before the residual addition, lack it."""


def check_fp32_residual(config: PretrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Refuse an architecture that `use_fp32_residual` does not support, before its weights are read."""
    find_norms(build_meta_model(config, trust_remote_code=trust_remote_code))


def use_fp32_residual(model: PreTrainedModel) -> None:
    """Keep the residual stream of a 16-bit model in float32; a wider model is not changed."""
    dtype = model.get_input_embeddings().weight.dtype
    if dtype.itemsize >= torch.float32.itemsize:
        return
    norms = find_norms(model)
    model.get_input_embeddings().register_forward_hook(partial(_cast_to_dtype, torch.float32))
    for norm in norms:
        norm.register_forward_hook(partial(_cast_to_dtype, dtype))
    for name, module in model.get_decoder().named_children():
        if name.startswith("rotary_emb"):
            module.register_forward_pre_hook(partial(_cast_rotary_input, dtype))
    _verify(model, norms)


def find_norms(model: PreTrainedModel) -> list[nn.Module]:
    """The norms over hidden states: the final one, then those of the layers, without query and key norms."""
    decoder, size = model.get_decoder(), model.config.get_text_config().hidden_size
    layers = getattr(decoder, "layers", None)
    owners = [decoder, *layers] if isinstance(layers, nn.ModuleList) else []
    norms_of_owner = [[child for child in owner.children() if _is_norm(child, size)] for owner in owners]
    is_first = [_is_norm(getattr(layer, FIRST_NORM, None), size) for layer in owners[1:]]
    if not owners or not all(norms_of_owner) or not all(is_first):
        raise _build_error(model, f"its layers do not start with an RMS norm named {FIRST_NORM}")
    return [norm for norms in norms_of_owner for norm in norms]


def _is_norm(module: nn.Module | None, size: int) -> bool:
    """Whether its only parameter is a [hidden size] weight. `nn.LayerNorm` refuses inputs wider than its weight."""
    if module is None or isinstance(module, nn.LayerNorm):
        return False
    return {name: weight.shape for name, weight in module.named_parameters()} == {"weight": (size,)}


def _cast_to_dtype(dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.to(dtype)


def _cast_rotary_input(dtype: torch.dtype, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Replace the first input, of which a rotary embedding reads only device and dtype, by an empty `dtype` tensor."""
    sample, *rest = inputs
    return sample.new_empty(0, dtype=dtype), *rest


@torch.no_grad()
def _verify(model: PreTrainedModel, norms: list[nn.Module]) -> None:
    """Refuse a model whose forward fails on one token, or whose final norm reads anything but float32."""
    seen: list[torch.dtype] = []
    handle = norms[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    try:
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    except RuntimeError as error:
        raise _build_error(model, " ".join(str(error).split())[:200]) from error
    finally:
        handle.remove()
    if seen != [torch.float32]:
        raise _build_error(model, "its layers do not keep the residual stream in the dtype of the embeddings")


def _build_error(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"model.residual_dtype=float32 is not supported for {type(model).__name__} ({reason}); leave it at 'model'"
    )
