"""Models and tokenizers from a folder, a hub id, a `.gguf` file or the folder of an adapter.

Whatever cannot work is said before long work begins: `check_model` reads the configuration only, `load_tokenizer` and
`load_model` then load what they name. Every failure is one `ModelError` sentence with the knob to turn. A loaded model
runs our attention and its parameters take gradients; nothing is downloaded when the machine is offline.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2.exceptions import TemplateSyntaxError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tunesmith.config import LoraSection, ModelSection
from tunesmith.errors import ModelError
from tunesmith.hub import offline_if_unreachable
from tunesmith.model.adapters.adapter import check_adapter, check_fingerprint, check_same_adapter
from tunesmith.model.checkpoint import hidden_progress_bars
from tunesmith.model.forward.attention import use_plan_attention
from tunesmith.model.forward.fp32_residual import check_residuals, widen_residuals
from tunesmith.model.source.resolve import ModelSource, explain_failure, find_model

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOAD_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    struct.error,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    pickle.UnpicklingError,
)
"""What transformers raises on files that are missing, broken or of an unknown kind."""


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


def load_config(path: str, *, trust_remote_code: bool = False, base_path: str | None = None) -> PretrainedConfig:
    """Read a model's configuration without its weights."""
    source = find_model(path, base_path)
    try:
        with offline_if_unreachable(source.name_or_path):
            return AutoConfig.from_pretrained(source.name_or_path, trust_remote_code=trust_remote_code, **source.kwargs)
    except LOAD_ERRORS as error:
        raise explain_failure(path, source, error) from error


def load_section_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """The tokenizer that a model section describes."""
    return load_tokenizer(
        section.path,
        chat_template=section.chat_template,
        trust_remote_code=section.trust_remote_code,
        base_path=section.base_path,
    )


def load_tokenizer(
    path: str, *, chat_template: str | None = None, trust_remote_code: bool = False, base_path: str | None = None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that can render chats; `chat_template` is the path of a jinja file to use instead of its own.

    An adapter folder may bring a tokenizer; else its base's is taken.
    """
    source = find_model(path, base_path)
    if source.adapter is not None and (source.adapter.folder / "tokenizer_config.json").is_file():
        source = ModelSource(name_or_path=str(source.adapter.folder))
    try:
        with offline_if_unreachable(source.name_or_path):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                source.name_or_path, trust_remote_code=trust_remote_code, **source.kwargs
            )
    except LOAD_ERRORS as error:
        raise explain_failure(path, source, error) from error
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {path!r} has no chat template, so messages cannot be rendered; "
            "set model.chat_template to a jinja file or take an instruct model"
        )
    check_template(tokenizer, chat_template or path)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path!r} names no end-of-sequence token; set eos_token in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    """Refuse a chat template with a syntax error; what it makes of messages is found out later."""
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template of {place!r} has a syntax error in line {error.lineno}: {error.message}; "
                "mend it, or set model.chat_template to another jinja file"
            ) from error
        except Exception:  # noqa: BLE001 - templates may refuse such a conversation in any way
            continue


def load_section_model(section: ModelSection) -> PreTrainedModel:
    """The model that a section describes, on its device and in its type."""
    device = resolve_device(section.device)
    return load_model(
        section.path,
        dtype=resolve_dtype(section.dtype, device),
        device=device,
        trust_remote_code=section.trust_remote_code,
        base_path=section.base_path,
        lora=section.lora,
        has_wide_residuals=section.residual_dtype == "float32",
    )


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    base_path: str | None = None,
    lora: LoraSection | None = None,
    has_wide_residuals: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in eval mode, with our attention and, if asked for, residuals in float32.

    Every parameter takes gradients, and an adapter in `path` is merged; with `lora` the adapter in `path` or a new one
    is live, and takes them alone.
    """
    source = find_model(path, base_path)
    placing: dict[str, Any] = {}
    if lora is not None and lora.quantization == "nf4":
        from tunesmith.model.adapters.lora import build_quantization  # PEFT takes seconds to import

        placing = {"quantization_config": build_quantization(dtype), "device_map": {"": device}}
    try:
        with hidden_progress_bars(), offline_if_unreachable(source.name_or_path):
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                source.name_or_path,
                dtype=dtype,
                attn_implementation="sdpa",
                trust_remote_code=trust_remote_code,
                **source.kwargs,
                **placing,
            )
    except LOAD_ERRORS as error:
        raise explain_failure(path, source, error) from error
    if source.gguf_file is not None:
        forget_gguf_quantization(model)
    check_architecture(model, path)
    if not placing:
        model.to(device)
    model.eval()
    model = install_adapter(model, source, lora, dtype=dtype)
    use_plan_attention(model)
    if has_wide_residuals:
        widen_residuals(model)
    return model


def install_adapter(
    model: PreTrainedModel, source: ModelSource, lora: LoraSection | None, *, dtype: torch.dtype
) -> PreTrainedModel:
    """Merge the source's adapter, or make it or a new one live and the only part that takes gradients."""
    if source.adapter is None and lora is None:
        return model.requires_grad_(True)
    from tunesmith.model.adapters.lora import (  # PEFT takes seconds to import
        add_adapter,
        keep_layout,
        load_adapter,
        merge_adapter,
    )

    if lora is None:
        assert source.adapter is not None
        return merge_adapter(model, source.adapter).requires_grad_(True)
    keep_layout(model)
    place = Path(source.name_or_path, source.gguf_file or "")
    base = str(place.absolute()) if place.exists() else source.name_or_path
    if source.adapter is None:
        add_adapter(model, lora, base=base, dtype=dtype)
    else:
        load_adapter(model, source.adapter, lora, base=base, dtype=dtype)
    return model.eval()


def forget_gguf_quantization(model: PreTrainedModel) -> None:
    """Weights read from GGUF are whole here, but transformers marks them quantised and then refuses to save them."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def check_section(section: ModelSection) -> PretrainedConfig:
    """Check all of a section that can be known without loading weights, and return the model's configuration."""
    device = resolve_device(section.device)
    config = check_model(
        section.path,
        max_model_len=section.max_model_len,
        trust_remote_code=section.trust_remote_code,
        base_path=section.base_path,
    )
    load_section_tokenizer(section)
    check_types(section, config)
    if section.lora is not None:
        adapter = find_model(section.path, section.base_path).adapter
        if adapter is not None:
            check_same_adapter(adapter, section.lora)
        if section.lora.quantization == "nf4":
            from tunesmith.model.adapters.lora import check_quantization  # PEFT takes seconds to import

            check_quantization(config, device)
    return config


def check_types(section: ModelSection, config: PretrainedConfig) -> None:
    """Refuse float32 residuals where a model of the section's type, its own or a companion, cannot have them."""
    dtype = resolve_dtype(section.dtype, resolve_device(section.device))
    if section.residual_dtype == "float32" and dtype != torch.float32:
        check_residuals(config, trust_remote_code=section.trust_remote_code)


def check_model(
    path: str, *, max_model_len: int, trust_remote_code: bool = False, base_path: str | None = None
) -> PretrainedConfig:
    """Check all that can be known of a model without loading weights, and return its configuration."""
    config = load_config(path, trust_remote_code=trust_remote_code, base_path=base_path)
    check_lengths(config, max_model_len)
    adapter = find_model(path, base_path).adapter
    if adapter is not None:
        check_adapter(adapter, config)
        check_fingerprint(adapter)
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
