"""Checkpoints of several towers, such as vision-language models, of which sampler and trainer use the text decoder.

The whole model is loaded, so that checkpoints and exports hold every tower under the model type of the source. Towers
other than the text decoder and its head never run, because messages are text, and take no gradients.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def find_auto_class(config: PretrainedConfig) -> type[AutoModelForCausalLM | AutoModelForImageTextToText]:
    """The class that builds every tower of a model; the one for causal language models drops some, or has no entry."""
    is_text = config.get_text_config() is config and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    is_text |= type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def find_model_class(config: PretrainedConfig) -> Any:
    """The class that `find_auto_class` builds for this configuration, or None."""
    is_text = find_auto_class(config) is AutoModelForCausalLM
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING if is_text else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return mapping.get(type(config), None)


def choose_attention(config: PretrainedConfig) -> dict[str, str]:
    """The attention to load a model with, by part; plan attention replaces it, also where `sdpa` lacks a cap on scores.

    Towers that never run have the one that all of them support.
    """
    model_class = find_model_class(config)
    name = "eager" if model_class is not None and not model_class._supports_sdpa else "sdpa"
    return dict.fromkeys(config.sub_configs, "eager") | name_text_parts(config, name)


def name_text_parts(config: PretrainedConfig, attention: str) -> dict[str, str]:
    """This attention for the model and its text decoder, as transformers takes it."""
    text = config.get_text_config()
    return {"": attention} | {key: attention for key in config.sub_configs if getattr(config, key, None) is text}


def list_towers(model: nn.Module) -> list[str]:
    """Names of the modules that are neither in the text decoder nor in its head; empty for a text model."""
    if not isinstance(model, PreTrainedModel) or model.config.get_text_config() is model.config:
        return []
    parts = [part for part in (model.get_decoder(), model.get_output_embeddings()) if part is not None]
    text = {id(module) for part in parts for module in part.modules()}

    def walk(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            if not any(id(each) in text for each in child.modules()):
                yield prefix + name
            elif id(child) not in text:
                yield from walk(child, f"{prefix}{name}.")

    return list(walk(model, ""))


def train_all_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Let every weight of the text decoder and its head take gradients, and no other."""
    model.requires_grad_(True)
    for name in list_towers(model):
        model.get_submodule(name).requires_grad_(False)
    return model


def copy_processor(model: PreTrainedModel, folder: Path) -> None:
    """Copy the settings of image processors, which are files beside the weights, from the model's source."""
    if not list_towers(model):
        return
    for name in PROCESSOR_FILES:
        file = cached_file(
            model.name_or_path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )  # fmt: skip
        if file is not None:
            shutil.copyfile(file, folder / name)
