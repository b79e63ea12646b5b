"""LoRA adapters through PEFT: inject into a model, load, merge, save.

PEFT's layers replace linear layers inside the model; the model object stays the same, and engine and trainer run the
same forward. Only the adapter's factors take gradients. Files are in PEFT's format: `PeftModel.from_pretrained` reads
them. Importing this file imports PEFT and takes seconds, so other files import it lazily.
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
from tunesmith.model.adapters.adapter import KEY_PREFIX, build_meta_model, has_same_layout
from tunesmith.model.source.fingerprint import compute_fingerprint
from tunesmith.model.source.resolve import ADAPTER_WEIGHTS, BASE_FINGERPRINT, AdapterFiles
from tunesmith.model.towers import build_tower_pattern
from tunesmith.storage import save_json

ADAPTER = "default"
"""PEFT's default adapter name; a model has one adapter."""
MAX_QUANTIZATION_ERROR = 0.15
"""NF4's relative error on normally distributed weights is 0.09; kernels with misplaced scales are far above this."""


def build_quantization(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Four-bit NF4 weights with double quantization (of the scales too), computing in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def check_quantization(config: PretrainedConfig, device: torch.device) -> None:
    """Refuse NF4 if bitsandbytes is missing, does not work on the device, or is wrong for one of the model's widths."""
    knob = "model.lora.quantization=nf4"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(f"{knob} needs the package bitsandbytes: pip install 'tunesmith[qlora]'")
    widths = {layer.in_features for layer in build_meta_model(config).modules() if isinstance(layer, nn.Linear)}
    for width in sorted(widths):
        try:
            error = measure_quantization_error(width, device)
        except (RuntimeError, NotImplementedError, ValueError, AttributeError) as failure:
            reason = " ".join(str(failure).split())
            raise ModelError(f"{knob}: bitsandbytes does not work on {device.type} here ({reason[:200]})") from failure
        if not error < MAX_QUANTIZATION_ERROR:
            raise ModelError(
                f"{knob}: bitsandbytes has an error of {error:.0%} on weights of {width} columns on {device.type}, "
                "where NF4 has about 9 %: this model cannot be quantized here"
            )


def disable_cpu_repacking(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking NF4 weights at the first forward without gradients.

    On CPUs with AVX-512 BF16 it would choose a layout that computes in bfloat16 and has no backward.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False


def measure_quantization_error(width: int, device: torch.device) -> float:
    """Relative NF4 error of normally distributed weights with `width` columns."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit  # an optional package

    weight = torch.randn(64, width, generator=torch.Generator().manual_seed(0)).to(device)
    restored = dequantize_4bit(*quantize_4bit(weight, compress_statistics=True, quant_type="nf4"))
    return ((restored - weight).norm() / weight.norm()).item()


def add_adapter(model: PreTrainedModel, lora: LoraSection, *, base: str, dtype: torch.dtype) -> None:
    """Inject a new adapter; the model's outputs do not change until the adapter is trained."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=lora.r,
        lora_dropout=lora.dropout,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        target_modules=resolve_targets(model, lora.target_modules),
        exclude_modules=build_tower_pattern(model),
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(lora.seed)
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"model.lora.target_modules={lora.target_modules!r}: {reason[:300]}") from error
    set_adapter_dtype(model, dtype)


def load_adapter(
    model: PreTrainedModel, adapter: AdapterFiles, lora: LoraSection, *, base: str, dtype: torch.dtype
) -> None:
    """Inject an adapter from disk for further training, with the dropout of `lora` in place of its saved one."""
    attach_adapter(model, adapter, is_trainable=True)
    model.peft_config[ADAPTER].base_model_name_or_path = base
    set_dropout(model, lora.dropout)
    set_adapter_dtype(model, dtype)


def set_dropout(model: PreTrainedModel, dropout: float) -> None:
    """Set the dropout of the adapter's layers."""
    model.peft_config[ADAPTER].lora_dropout = dropout
    for module in model.modules():
        if isinstance(layers := getattr(module, "lora_dropout", None), nn.ModuleDict) and ADAPTER in layers:
            layers[ADAPTER] = nn.Dropout(dropout) if dropout else nn.Identity()


def merge_adapter(model: PreTrainedModel, adapter: AdapterFiles) -> PreTrainedModel:
    """The model with the adapter merged into its weights."""
    merged: PreTrainedModel = attach_adapter(model, adapter, is_trainable=False).merge_and_unload(safe_merge=True)
    return merged


def attach_adapter(model: PreTrainedModel, adapter: AdapterFiles, *, is_trainable: bool) -> PeftModel:
    """Inject an adapter from disk into the model in place; refuse one with missing tensors."""
    try:
        peft_model = PeftModel.from_pretrained(
            model, str(adapter.folder), adapter_name=ADAPTER, is_trainable=is_trainable
        )
        saved = load_file(adapter.folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the adapter {str(adapter.folder)!r} cannot be loaded: {reason[:300]}") from error
    expected = {KEY_PREFIX + name for name in read_adapter_state(model)}
    if missing := sorted(expected - saved.keys()):
        raise ModelError(f"the adapter {str(adapter.folder)!r} is incomplete: it has no {missing[0]}")
    return peft_model


def resolve_targets(model: PreTrainedModel, targets: str | tuple[str, ...]) -> str | list[str]:
    """`target_modules` for PEFT; "attention" means the linear children of modules with a `layer_idx`."""
    if isinstance(targets, tuple):
        check_target_names(model, targets)
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
            f"no attention projections found in {type(model).__name__}; name layers in model.lora.target_modules"
        )
    return sorted(names)


def set_adapter_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the trainable parameters to the activations' dtype; the optimizer keeps float32 masters of 16-bit ones."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def read_adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's tensors, not copied, by PEFT's names without `KEY_PREFIX`."""
    state: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return state


def save_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Write the adapter in PEFT's format, with a fingerprint of its base if the base has safetensors files."""
    config = copy(model.peft_config[ADAPTER])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    state = {KEY_PREFIX + name: tensor.contiguous() for name, tensor in read_adapter_state(model).items()}
    save_file(state, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    fingerprint = compute_fingerprint(str(config.base_model_name_or_path))
    if fingerprint is not None:
        save_json(folder / BASE_FINGERPRINT, fingerprint)


def restore_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Copy a saved adapter into the model's adapter, in place and bit for bit."""
    try:
        saved = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot read the adapter in {folder}: {error}") from error
    state = {KEY_PREFIX + name: tensor for name, tensor in read_adapter_state(model).items()}
    if state.keys() != saved.keys() or any(not has_same_layout(saved[name], state[name]) for name in state):
        raise StorageError(f"{folder} does not hold the adapter of this model: layers, shapes or dtypes differ")
    set_peft_model_state_dict(
        model, {name.removeprefix(KEY_PREFIX): tensor for name, tensor in saved.items()}, adapter_name=ADAPTER
    )


def check_target_names(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Refuse a name that matches no linear layer; PEFT ignores it if another name matches."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ModelError(
                f"model.lora.target_modules: {type(model).__name__} has no linear layer {target!r}; its layers: {known}"
            )
