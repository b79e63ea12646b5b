"""Models and tokenizers from a folder, a hub id or a `.gguf` file.

Whatever cannot work is said before long work begins: `check_model` reads the configuration only, `load_tokenizer` and
`load_model` then load what they name. Every failure is one `ModelError` sentence with the knob to turn. A loaded model
runs our attention and its parameters take gradients; nothing is downloaded when the machine is offline.
"""

from __future__ import annotations

import importlib.util
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tunesmith.errors import ModelError
from tunesmith.model.attention import use_plan_attention
from tunesmith.model.checkpoint import hidden_progress_bars

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    struct.error,
    SafetensorError,
    StrictDataclassError,
)
"""What transformers raises on files that are missing, broken or of an unknown kind."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model's files are, in the terms of `from_pretrained`."""

    name_or_path: str
    gguf_file: str | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` names, if this machine has it."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"model.device={name!r} is no device; allowed: auto, cpu, cuda, cuda:N") from error
    if device.type not in {"cpu", "cuda"}:
        raise ModelError(f"model.device={name!r} is not supported; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ModelError(f"model.device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The parameters' type; `auto` is float32 on a CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ModelError(f"model.dtype={name!r} is not supported; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def find_model(path: str) -> ModelSource:
    """Tell folder, `.gguf` file and hub id apart; a path that is not there is an error here, not in a download."""
    place = Path(path).expanduser()
    if place.suffix == ".gguf":
        if not place.is_file():
            raise ModelError(f"model.path={path!r}: there is no such .gguf file")
        check_gguf_reader()
        return ModelSource(name_or_path=str(place.parent), gguf_file=place.name)
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise ModelError(
                f"model.path={path!r} is a folder without config.json; give a Hugging Face model folder, "
                "such as global_step_N of a run, or a .gguf file"
            )
        return ModelSource(name_or_path=str(place))
    if place.exists():
        raise ModelError(f"model.path={path!r} is a file, but not a .gguf file; give the folder that holds config.json")
    if not HUB_ID.fullmatch(path):
        raise ModelError(f"model.path={path!r}: there is no such folder")
    return ModelSource(name_or_path=path)


def check_gguf_reader() -> None:
    """Refuse GGUF files where the package that reads them is absent."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading a .gguf file needs the package gguf: pip install 'tunesmith[gguf]'")


def load_config(path: str, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read a model's configuration without its weights."""
    source = find_model(path)
    try:
        return AutoConfig.from_pretrained(source.name_or_path, trust_remote_code=trust_remote_code, **source.kwargs)
    except LOAD_ERRORS as error:
        raise _explain(path, error) from error


def load_tokenizer(
    path: str, *, chat_template: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that can render chats; `chat_template` is the path of a jinja file to use instead of its own."""
    source = find_model(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.name_or_path, trust_remote_code=trust_remote_code, **source.kwargs
        )
    except LOAD_ERRORS as error:
        raise _explain(path, error) from error
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {path!r} has no chat template, so messages cannot be rendered; "
            "set model.chat_template to a jinja file or take an instruct model"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path!r} names no end-of-sequence token; set eos_token in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    path: str, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Load a causal language model in eval mode, with our attention, every parameter taking gradients."""
    source = find_model(path)
    try:
        with hidden_progress_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                source.name_or_path,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
                **source.kwargs,
            )
    except LOAD_ERRORS as error:
        raise _explain(path, error) from error
    if source.gguf_file is not None:
        forget_gguf_quantization(model)
    check_architecture(model, path)
    model.to(device).eval().requires_grad_(True)
    use_plan_attention(model)
    return model


def forget_gguf_quantization(model: PreTrainedModel) -> None:
    """Weights read from GGUF are whole here, but transformers marks them quantised and then refuses to save them."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def check_model(path: str, *, max_model_len: int, trust_remote_code: bool = False) -> PretrainedConfig:
    """Check all that can be known without loading weights, and return the configuration."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    check_lengths(config, max_model_len)
    return config


def check_lengths(config: PretrainedConfig, max_model_len: int) -> None:
    """Refuse a context longer than the positions the model was made for."""
    num_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if num_positions is not None and max_model_len > num_positions:
        raise ModelError(
            f"model.max_model_len={max_model_len} is longer than the model's {num_positions} positions; "
            f"set it to {num_positions} or less"
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for."""
    num_embeddings = model.get_input_embeddings().num_embeddings
    largest = max(tokenizer.get_vocab().values())
    if largest >= num_embeddings:
        raise ModelError(
            f"the tokenizer has ids up to {largest} but the model has {num_embeddings} embeddings; "
            "model and tokenizer do not belong together"
        )


def check_architecture(model: PreTrainedModel, path: str) -> None:
    """Refuse modelling code that does not look its attention up in transformers' attention interface."""
    if not (model._supports_attention_backend and model._supports_sdpa):
        raise ModelError(
            f"the architecture {type(model).__name__} of {path!r} does not support transformers' attention interface; "
            "take a model of the Llama, Qwen, Mistral, Gemma or Phi families"
        )


def _read_template(path: str) -> str:
    place = Path(path).expanduser()
    if not place.is_file():
        raise ModelError(f"model.chat_template={path!r}: there is no such file; give the path of a jinja file")
    return place.read_text(encoding="utf-8")


def _explain(path: str, error: Exception) -> ModelError:
    """One sentence for what transformers said in many."""
    if not Path(path).expanduser().exists():
        return ModelError(
            f"model.path={path!r} is no folder here, and the hub did not give it "
            "(offline, unknown or gated); give a local folder or download the model first"
        )
    reason = " ".join(str(error).split())
    return ModelError(f"model.path={path!r} cannot be loaded: {reason[:300]}")
