"""Adapters through PEFT: put into a model, read, merged, saved.

An adapter lives inside the model: PEFT's layers take the place of linear ones, the model stays what it was to everybody
else, and the sampler's forward is the trainer's. Only the adapter's factors take gradients. Files are PEFT's own:
`PeftModel.from_pretrained` reads them. Importing this file imports PEFT, which takes seconds, so others defer it.
"""

from __future__ import annotations

import importlib.util
from copy import copy
from pathlib import Path

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from tunesmith.config import LoraSection
from tunesmith.errors import ModelError, StorageError
from tunesmith.model.adapters.adapter import KEY_PREFIX, build_skeleton
from tunesmith.model.source.adapter_files import ADAPTER_WEIGHTS, BASE_FINGERPRINT, AdapterFiles
from tunesmith.model.source.fingerprint import compute_fingerprint
from tunesmith.storage import save_json

ADAPTER = "default"
"""PEFT's name for the only adapter of a model."""
LARGEST_ROUNDING = 0.15
"""Relative error of NF4 on normal weights is 0.09; kernels that misplace their scales are far beyond this."""


def build_quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Four bits a weight in NF4 with its scales quantised too, multiplied in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def check_quantization(config: PretrainedConfig, device: torch.device) -> None:
    """Refuse four-bit weights where bitsandbytes is absent, or wrong for the device or for a width of the model."""
    knob = "model.lora.quantization=nf4"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(f"{knob} needs the package bitsandbytes: pip install 'tunesmith[qlora]'")
    widths = {layer.in_features for layer in build_skeleton(config).modules() if isinstance(layer, nn.Linear)}
    for width in sorted(widths):
        try:
            error = measure_rounding(width, device)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError) as failure:
            reason = " ".join(str(failure).split())
            raise ModelError(f"{knob}: bitsandbytes does not work on {device.type} here ({reason[:200]})") from failure
        if not error < LARGEST_ROUNDING:
            raise ModelError(
                f"{knob}: bitsandbytes loses {error:.0%} of weights of {width} columns on {device.type}, where NF4 "
                "loses about 9 %: this model cannot be held in four bits here"
            )


def keep_layout(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from changing the weights' layout at the first forward without gradients.

    On CPUs with bfloat16 it would, to a layout that computes in bfloat16 and through which no gradient flows.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def measure_rounding(width: int, device: torch.device) -> float:
    """Relative error of normal weights of `width` columns in NF4."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # an optional package

    weight = torch.randn(64, width, generator=torch.Generator().manual_seed(0)).to(device)
    restored = dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))
    return ((restored - weight).norm() / weight.norm()).item()


def add_adapter(model: PreTrainedModel, lora: LoraSection, *, base: str, dtype: torch.dtype) -> None:
    """Put a new adapter into the model, which computes what it did until the adapter is trained."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=lora.r,
        lora_dropout=lora.dropout,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        target_modules=resolve_targets(model, lora.target_modules),
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(lora.seed)
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"model.lora.target_modules={lora.target_modules!r}: {reason[:300]}") from error
    set_adapter_type(model, dtype)


def load_adapter(
    model: PreTrainedModel, adapter: AdapterFiles, lora: LoraSection, *, base: str, dtype: torch.dtype
) -> None:
    """Put an adapter from disk into the model, to be trained on with the dropout of `lora`, whatever it had before."""
    attach(model, adapter, is_trainable=True)
    model.peft_config[ADAPTER].base_model_name_or_path = base
    set_dropout(model, lora.dropout)
    set_adapter_type(model, dtype)


def set_dropout(model: PreTrainedModel, dropout: float) -> None:
    """Give the live adapter's layers this dropout."""
    model.peft_config[ADAPTER].lora_dropout = dropout
    for module in model.modules():
        if isinstance(layers := getattr(module, "lora_dropout", None), nn.ModuleDict) and ADAPTER in layers:
            layers[ADAPTER] = nn.Dropout(dropout) if dropout else nn.Identity()


def merge_adapter(model: PreTrainedModel, adapter: AdapterFiles) -> PreTrainedModel:
    """The model with the adapter added into its weights."""
    merged: PreTrainedModel = attach(model, adapter, is_trainable=False).merge_and_unload(safe_merge=True)
    return merged


def attach(model: PreTrainedModel, adapter: AdapterFiles, *, is_trainable: bool) -> PeftModel:
    """Put an adapter from disk into the model in place; raise when a part of it is missing."""
    try:
        attached = PeftModel.from_pretrained(
            model, str(adapter.folder), adapter_name=ADAPTER, is_trainable=is_trainable
        )
        saved = load_file(adapter.folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the adapter {str(adapter.folder)!r} cannot be loaded: {reason[:300]}") from error
    expected = {KEY_PREFIX + name for name in read_adapter_state(model)}
    if missing := sorted(expected - saved.keys()):
        raise ModelError(f"the adapter {str(adapter.folder)!r} is incomplete: it has no {missing[0]}")
    return attached


def resolve_targets(model: PreTrainedModel, targets: str | tuple[str, ...]) -> str | list[str]:
    """Layer names as PEFT takes them: those of attention are the linear children of modules that know their layer."""
    if isinstance(targets, tuple):
        check_names(model, targets)
        return list(targets)
    if targets != "attention":
        return targets
    names = {
        name
        for module in model.modules()
        if hasattr(module, "layer_idx")
        for name, child in module.named_children()
        if isinstance(child, nn.Linear)
    }
    if not names:
        raise ModelError(
            f"{type(model).__name__} has no attention projections to be found; name layers in model.lora.target_modules"
        )
    return sorted(names)


def set_adapter_type(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give what trains the type of the activations: the optimizer keeps float32 masters of narrower ones."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def read_adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's tensors by PEFT's names, without the prefix of its files; not copied."""
    state: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return state


def save_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Write the live adapter as PEFT does, with a fingerprint of its base where that can be read."""
    config = copy(model.peft_config[ADAPTER])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    state = {KEY_PREFIX + name: tensor.contiguous() for name, tensor in read_adapter_state(model).items()}
    save_file(state, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    fingerprint = compute_fingerprint(str(config.base_model_name_or_path))
    if fingerprint is not None:
        save_json(folder / BASE_FINGERPRINT, fingerprint)


def restore_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Copy a saved adapter into the live one, in place and bit for bit."""
    try:
        saved = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read the adapter in {folder}: {error}") from error
    state = {KEY_PREFIX + name: tensor for name, tensor in read_adapter_state(model).items()}
    if state.keys() != saved.keys() or any(not is_alike(saved[name], state[name]) for name in state):
        raise StorageError(f"{folder} does not hold the adapter of this model: it has other layers, shapes or types")
    set_peft_model_state_dict(
        model, {name.removeprefix(KEY_PREFIX): tensor for name, tensor in saved.items()}, adapter_name=ADAPTER
    )


def is_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def check_names(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Refuse a name that no linear layer ends on; PEFT passes over it where another one fits."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ModelError(
                f"model.lora.target_modules: {type(model).__name__} has no linear layer {target!r}; its layers: {known}"
            )
