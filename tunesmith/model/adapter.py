"""Adapter folders, before anything is loaded: which base an adapter stands on, and whether it fits that base.

A folder is an adapter when it holds PEFT's `adapter_config.json` and no weights of a whole model. Shapes are compared
with the base's architecture, and the adapters saved here also know their base's weights by a fingerprint. PEFT itself
is not imported: that takes seconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tunesmith.config import LoraSection
from tunesmith.errors import ModelError
from tunesmith.model.fingerprint import compute_fingerprint
from tunesmith.storage import load_json

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_FINGERPRINT = "base_fingerprint.json"
KEY_PREFIX = "base_model.model."
"""What PEFT puts before the name of a module in its files."""

# PEFT imports bitsandbytes where it is installed, which on a CPU warns of kernels that it would like to download.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """An adapter on disk."""

    folder: Path
    base: str
    """Folder, `.gguf` file or hub id of the model under it."""
    r: int
    alpha: float
    target_modules: Any
    """As PEFT's config says it: a pattern or a list of names."""


def is_adapter(place: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (place / ADAPTER_CONFIG).is_file() and not any(place.glob("model*.safetensors"))


def find_adapter(path: str, base_path: str | None) -> AdapterFiles | None:
    """The adapter that a model path names, or None when it names a whole model."""
    folder = Path(path).expanduser()
    if not is_adapter(folder):
        if base_path is not None:
            raise ModelError(f"model.base_path={base_path!r} has no effect: model.path={path!r} is no adapter folder")
        return None
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind, base = settings["peft_type"], base_path or settings["base_model_name_or_path"]
        adapter = AdapterFiles(
            folder=folder,
            base=base or "",
            r=settings["r"],
            alpha=settings["lora_alpha"],
            target_modules=settings["target_modules"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model.path={path!r}: {ADAPTER_CONFIG} is not that of a LoRA adapter ({error!r})") from error
    if kind != "LORA":
        raise ModelError(f"model.path={path!r} is an adapter of type {kind}; LoRA adapters are supported")
    if not base:
        raise ModelError(f"model.path={path!r}: the adapter does not name its base; set model.base_path")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"model.path={path!r}: the adapter has no {ADAPTER_WEIGHTS}")
    return adapter


def check_adapter(adapter: AdapterFiles, config: PretrainedConfig) -> None:
    """Refuse an adapter that was made for a base of other layers than this configuration describes."""
    skeleton = build_skeleton(config)
    for name, (num_inputs, num_outputs) in read_layer_shapes(adapter).items():
        found = find_linear_shape(skeleton, name)
        if found != (num_inputs, num_outputs):
            has = "has no such layer" if found is None else f"has {found[0]} -> {found[1]}"
            raise ModelError(
                f"the adapter {str(adapter.folder)!r} is for another base than {adapter.base!r}: it changes {name} "
                f"({num_inputs} -> {num_outputs}), and this base {has}"
            )


def build_skeleton(config: PretrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model's layers without memory for their weights."""
    with torch.device("meta"):
        skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return skeleton


def check_fingerprint(adapter: AdapterFiles) -> None:
    """Refuse a base whose weights are laid out as those of the adapter's own base, and are others."""
    if not (adapter.folder / BASE_FINGERPRINT).is_file():
        return
    known, found = load_json(adapter.folder / BASE_FINGERPRINT), compute_fingerprint(adapter.base)
    if found is not None and known["layout"] == found["layout"] and known["rows"] != found["rows"]:
        raise ModelError(
            f"the adapter {str(adapter.folder)!r} is for another base than {adapter.base!r}: that model has the same "
            "layers but other weights; set model.base_path to the model that the adapter was trained on"
        )


def check_same_adapter(adapter: AdapterFiles, lora: LoraSection) -> None:
    """Refuse settings of a new adapter that the loaded one contradicts."""
    defaults = LoraSection()
    for key, value in (("r", adapter.r), ("alpha", adapter.alpha)):
        asked = getattr(lora, key)
        if asked not in (value, getattr(defaults, key)):
            raise ModelError(f"model.lora.{key}={asked:g}, but the adapter {str(adapter.folder)!r} has {value:g}")
    if isinstance(lora.target_modules, tuple) and set(lora.target_modules) != set(adapter.target_modules):
        raise ModelError(
            f"model.lora.target_modules={list(lora.target_modules)}, but the adapter {str(adapter.folder)!r} has "
            f"{adapter.target_modules}"
        )


def read_layer_shapes(adapter: AdapterFiles) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear layer that the adapter changes, by the layer's name in the base."""
    num_inputs: dict[str, int] = {}
    num_outputs: dict[str, int] = {}
    try:
        with safe_open(adapter.folder / ADAPTER_WEIGHTS, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - this is no mapping
                name, _, kind = key.removeprefix(KEY_PREFIX).rpartition(".lora_")
                if kind == "A.weight":
                    num_inputs[name] = file.get_slice(key).get_shape()[1]
                elif kind == "B.weight":
                    num_outputs[name] = file.get_slice(key).get_shape()[0]
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the adapter {str(adapter.folder)!r} cannot be read: {error}") from error
    if not num_inputs or num_inputs.keys() != num_outputs.keys():
        raise ModelError(f"the adapter {str(adapter.folder)!r} does not hold the two factors of each layer it changes")
    return {name: (num_inputs[name], num_outputs[name]) for name in num_inputs}


def find_linear_shape(model: nn.Module, name: str) -> tuple[int, int] | None:
    """Inputs and outputs of the linear layer of that name, if there is one."""
    module = dict(model.named_modules()).get(name)
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else None


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether an adapter is live in the model: its weights alone are trained and saved."""
    return bool(getattr(model, "peft_config", None))


@contextmanager
def disabled_adapter(model: PreTrainedModel) -> Iterator[None]:
    """The model as it is without its adapter: the base, bit for bit. A model without one stays as it is."""
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
