"""GGUF files of the tiny models, written by the package, valid or deliberately invalid."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from transformers import PreTrainedModel

from exported_models import CONFIGS, TOKENIZERS, build_random_model, build_tokenizer
from tunesmith.commands.export.gguf.architecture import describe_architecture
from tunesmith.commands.export.gguf.files import GgufPlan
from tunesmith.commands.export.gguf.vocabulary import describe_vocabulary
from tunesmith.commands.export.gguf.writer import write_gguf


def build_gguf_plan(model: PreTrainedModel, tokenizer: str = "qwen2", **architecture: object) -> GgufPlan:
    """The plan of a model with one of the tiny tokenizers; keyword arguments overwrite fields of its architecture."""
    return GgufPlan(
        name="tiny",
        license="mit",
        types=("f32",),
        num_threads=1,
        architecture=dataclasses.replace(describe_architecture(model.config), **architecture),
        vocabulary=describe_vocabulary(build_tokenizer(tokenizer), model.config),
    )


def write_tiny_gguf(name: str, path: Path, *, file_type: str = "f32", **architecture: object) -> PreTrainedModel:
    """Write one of CONFIGS as a GGUF file and return the model."""
    model = build_random_model(CONFIGS[name])
    write_gguf(path, model, build_gguf_plan(model, TOKENIZERS[name], **architecture), file_type=file_type)
    return model
