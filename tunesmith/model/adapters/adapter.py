"""Checks that an adapter fits its base model before weights are loaded, and its dropout in training.

Layer shapes are compared with the base's architecture. Adapters saved by this package also hold a fingerprint of their
base's weights. PEFT is not imported here, because that takes seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunesmith.config import LoraSection
from tunesmith.errors import ModelError
from tunesmith.model.source.fingerprint import compute_fingerprint
from tunesmith.model.source.resolve import ADAPTER_WEIGHTS, BASE_FINGERPRINT, AdapterFiles
from tunesmith.model.towers import find_auto_class
from tunesmith.storage import load_json

KEY_PREFIX = "base_model.model."
"""PEFT's prefix of module names in adapter files."""

# PEFT imports bitsandbytes if it is installed, which on a CPU warns about kernels to download.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def check_adapter(adapter: AdapterFiles, config: PretrainedConfig) -> None:
    """Refuse an adapter for layers or weights other than those of its base, which has this configuration."""
    meta_model = build_meta_model(config)
    for name, (num_inputs, num_outputs) in read_layer_shapes(adapter).items():
        found = find_shapes(meta_model, name)
        if (num_inputs, num_outputs) not in found:
            has = f"has {found[0][0]} -> {found[0][1]}" if found else "has no such layer"
            raise ModelError(
                f"the adapter {str(adapter.folder)!r} is for a base other than {adapter.base!r}: it adapts {name} "
                f"({num_inputs} -> {num_outputs}), and this base {has}"
            )
    check_fingerprint(adapter)


def build_meta_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """The model on the meta device, layers and shapes without weights; `options` are those of `from_config`."""
    with torch.device("meta"):
        meta_model: PreTrainedModel = find_auto_class(config).from_config(config, **options)
    return meta_model


def check_fingerprint(adapter: AdapterFiles) -> None:
    """Refuse a base with the layer shapes of the adapter's own base but different weights."""
    if not (adapter.folder / BASE_FINGERPRINT).is_file():
        return
    known, found = load_json(adapter.folder / BASE_FINGERPRINT), compute_fingerprint(adapter.base)
    if found is not None and known["layout"] == found["layout"] and known["rows"] != found["rows"]:
        raise ModelError(
            f"the adapter {str(adapter.folder)!r} is for a base other than {adapter.base!r}: that model has the same "
            "layers but different weights; set model.base_path to the model that the adapter was trained on"
        )


def check_same_adapter(adapter: AdapterFiles, lora: LoraSection) -> None:
    """Refuse `model.lora` settings that differ both from their defaults and from the loaded adapter's."""
    defaults = LoraSection()
    for key, value in (("r", adapter.r), ("alpha", adapter.alpha)):
        requested = getattr(lora, key)
        if requested not in (value, getattr(defaults, key)):
            raise ModelError(f"model.lora.{key}={requested:g}, but the adapter {str(adapter.folder)!r} has {value:g}")
    known = [*adapter.target_modules, *adapter.target_parameters]
    if isinstance(lora.target_modules, tuple) and set(lora.target_modules) != set(known):
        raise ModelError(
            f"model.lora.target_modules={list(lora.target_modules)}, but the adapter {str(adapter.folder)!r} has "
            f"{known}"
        )


def read_layer_shapes(adapter: AdapterFiles) -> dict[str, tuple[int, int]]:
    """Input and output sizes of each adapted linear layer, by the layer's name in the base."""
    num_inputs: dict[str, int] = {}
    num_outputs: dict[str, int] = {}
    try:
        with safe_open(adapter.folder / ADAPTER_WEIGHTS, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                name, _, kind = key.removeprefix(KEY_PREFIX).rpartition(".lora_")
                if kind == "A.weight":
                    num_inputs[name] = file.get_slice(key).get_shape()[1]
                elif kind == "B.weight":
                    num_outputs[name] = file.get_slice(key).get_shape()[0]
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the adapter {str(adapter.folder)!r} cannot be read: {error}") from error
    if not num_inputs or num_inputs.keys() != num_outputs.keys():
        raise ModelError(f"the adapter {str(adapter.folder)!r} does not hold both low-rank factors of each layer")
    return {name: (num_inputs[name], num_outputs[name]) for name in num_inputs}


def find_shapes(model: nn.Module, name: str) -> list[tuple[int, int]]:
    """Input and output sizes of the linear layer, or of the weights of the experts, of that name."""
    module = dict(model.named_modules()).get(name.replace(".base_layer", ""))  # PEFT nests adapters of one module
    if isinstance(module, nn.Linear):
        return [(module.in_features, module.out_features)]
    if isinstance(module, Conv1D):
        return [(module.nx, module.nf)]
    weights = [] if module is None else [each for each in module.parameters(recurse=False) if each.ndim == 3]
    order = slice(1, None) if getattr(module, "is_transposed", False) else slice(None, 0, -1)
    return [tuple(each.shape[order]) for each in weights]


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether the model has an active (not merged) adapter; then only its weights are trained and saved."""
    return bool(getattr(model, "peft_config", None))


@torch.no_grad()
def copy_state(saved: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into those of a model, in place."""
    for name, tensor in state.items():
        tensor.copy_(saved[name])


@contextmanager
def disabled_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model computes its base without the adapter, bit for bit; a model without one is unchanged."""
    layers: list[Any] = [
        module
        for module in model.modules()
        if hasattr(module, "enable_adapters") and not isinstance(module, PreTrainedModel)
    ]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def find_dropouts(model: nn.Module) -> list[nn.Dropout]:
    """The adapter's dropout layers with a positive probability; none without an adapter."""
    holders = [getattr(module, "lora_dropout", None) for module in model.modules()]
    layers = [layer for holder in holders if isinstance(holder, nn.ModuleDict) for layer in holder.values()]
    return [layer for layer in layers if isinstance(layer, nn.Dropout) and layer.p > 0]


@contextmanager
def active_dropout(dropouts: Sequence[nn.Dropout], *, seed: int, device: torch.device) -> Iterator[None]:
    """Within, these layers drop with masks from `seed`; torch's generators are restored afterwards."""
    if not dropouts:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for layer in dropouts:
            layer.train()
        try:
            yield
        finally:
            for layer in dropouts:
                layer.eval()
