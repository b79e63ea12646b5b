"""Load models and tokenizers from a folder, a hub id, a `.gguf` file or an adapter folder.

`check_model` finds what cannot work from the configuration alone, before any long work; `load_tokenizer` and
`load_model` then load. Every failure is a one-sentence `ModelError` that names the knob to change. A loaded model uses
plan attention and its parameters take gradients. Nothing is downloaded when the machine is offline.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from jinja2.exceptions import TemplateSyntaxError
from safetensors import SafetensorError
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tunesmith.config import LoraSection, ModelSection
from tunesmith.errors import ModelError
from tunesmith.hub import offline_if_unreachable
from tunesmith.model.adapters.adapter import build_meta_model, check_adapter, check_same_adapter
from tunesmith.model.checkpoint import hidden_progress_bars
from tunesmith.model.forward.attention import check_architecture, check_attention_interface, use_plan_attention
from tunesmith.model.forward.exact import check_exact, use_exact_numerics
from tunesmith.model.forward.fp32_residual import check_fp32_residual, use_fp32_residual
from tunesmith.model.source.resolve import ModelSource, explain_load_error, find_model
from tunesmith.model.towers import choose_attention, find_auto_class, train_all_weights

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOAD_ERRORS = (
    OSError,
    ImportError,
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
"""Errors that transformers raises for missing, damaged or unknown files, and for packages that reading them needs."""


@contextmanager
def loading(path: str, source: ModelSource) -> Iterator[None]:
    """Raise a one-sentence ModelError for what transformers raises while it loads."""
    try:
        with offline_if_unreachable(source.name_or_path):
            yield
    except LOAD_ERRORS as error:
        raise explain_load_error(path, source, error) from error


def resolve_device(name: str) -> torch.device:
    """The device named `auto`, `cpu`, `cuda` or `cuda:N`; refuse one that this machine does not have.

    If it is a GPU on which this process has no memory yet, its allocator rounds large sizes.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"model.device={name!r} is not a device; allowed: auto, cpu, cuda, cuda:N") from error
    if device.type not in {"cpu", "cuda"}:
        raise ModelError(f"model.device={name!r} is not supported; allowed: auto, cpu, cuda, cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        found = f"this machine has {torch.cuda.device_count()} CUDA devices"
        why = "" if torch.cuda.device_count() else f", because {explain_missing_gpu()}; auto takes the CPU"
        raise ModelError(f"model.device={name!r}: {found}{why}")
    round_allocations()
    return torch.device("cuda", index)


def explain_missing_gpu() -> str:
    """Why torch has no GPU."""
    has_gpu = Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None
    if has_gpu and torch.version.cuda is None:
        return "this torch is a CPU build; this machine has an NVIDIA GPU: install torch with CUDA"
    if has_gpu:
        return "torch cannot use the NVIDIA GPU of this machine: see `nvidia-smi` and CUDA_VISIBLE_DEVICES"
    return "torch finds no GPU"


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the parameters; `auto` is float32 on a CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ModelError(f"model.dtype={name!r} is not supported; allowed: auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def load_config(path: str, *, trust_remote_code: bool = False, base_path: str | None = None) -> PretrainedConfig:
    """Read a model's configuration without its weights."""
    source = find_model(path, base_path)
    with loading(path, source):
        return AutoConfig.from_pretrained(source.name_or_path, trust_remote_code=trust_remote_code, **source.kwargs)


def load_section_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a config's model section."""
    return load_tokenizer(
        section.path,
        chat_template=section.chat_template,
        trust_remote_code=section.trust_remote_code,
        base_path=section.base_path,
    )


def load_tokenizer(
    path: str, *, chat_template: str | None = None, trust_remote_code: bool = False, base_path: str | None = None
) -> PreTrainedTokenizerBase:
    """Load a tokenizer with a chat template; `chat_template` is the path of a jinja file that replaces its own.

    An adapter folder's own tokenizer is preferred over that of its base.
    """
    source = find_model(path, base_path)
    if source.adapter is not None and (source.adapter.folder / "tokenizer_config.json").is_file():
        source = ModelSource(name_or_path=str(source.adapter.folder))
    with loading(path, source):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.name_or_path, trust_remote_code=trust_remote_code, **source.kwargs
        )
    if source.gguf_file is not None:
        complete_gguf_tokenizer(Path(source.name_or_path, source.gguf_file), tokenizer)
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"model.chat_template={chat_template!r} is not a jinja file: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {path!r} has no chat template, so messages cannot be rendered; "
            "set model.chat_template to a jinja file or take an instruct model"
        )
    check_template(tokenizer, chat_template or path)
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path!r} has no end-of-sequence token; set eos_token in its files")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    """Refuse a chat template with a syntax error; whether it renders real conversations is not checked here."""
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template of {place!r} has a syntax error in line {error.lineno}: {error.message}; "
                "correct it, or set model.chat_template to another jinja file"
            ) from error
        except Exception:  # noqa: BLE001 - a template may refuse this conversation with any exception
            continue


def load_section_model(section: ModelSection) -> PreTrainedModel:
    """Load the model of a config's model section, on its device and in its dtype."""
    device = resolve_device(section.device)
    if section.numerics == "exact":
        use_exact_numerics()
    return load_model(
        section.path,
        dtype=resolve_dtype(section.dtype, device),
        device=device,
        trust_remote_code=section.trust_remote_code,
        base_path=section.base_path,
        lora=section.lora,
        has_fp32_residual=section.residual_dtype == "float32",
    )


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    base_path: str | None = None,
    lora: LoraSection | None = None,
    has_fp32_residual: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in eval mode, with plan attention and optionally a float32 residual stream.

    Without `lora` an adapter at `path` is merged and every parameter of the text decoder takes gradients. With `lora`
    the adapter at `path` or a new one stays active, and only its parameters take gradients.
    """
    source = find_model(path, base_path)
    config = load_config(path, trust_remote_code=trust_remote_code, base_path=base_path)
    check_stored_weights(path, config, lora)
    quantization: dict[str, Any] = {}
    if lora is not None and lora.quantization == "nf4":
        from tunesmith.model.adapters.lora import build_quantization  # PEFT takes seconds to import

        quantization = {"quantization_config": build_quantization(dtype), "device_map": {"": device}}
    elif is_mxfp4(config):
        quantization = {"quantization_config": Mxfp4Config(dequantize=True)}
    model: PreTrainedModel
    with loading(path, source), hidden_progress_bars():
        model, report = find_auto_class(config).from_pretrained(
            source.name_or_path,
            dtype=dtype,
            attn_implementation=choose_attention(config),
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **source.kwargs,
            **quantization,
        )
    if source.gguf_file is not None:
        check_gguf_tensors(Path(source.name_or_path, source.gguf_file), model)
    if missing := sorted(report["missing_keys"]):  # transformers has drawn them at random
        raise ModelError(
            f"{source.name_or_path!r} lacks {len(missing)} of the weights that its config.json describes, such as "
            f"{missing[0]}; take the whole model"
        )
    if source.gguf_file is not None or is_mxfp4(config):
        clear_quantization(model)
        model._weight_conversions = None  # those of MXFP4 would save dequantized weights under its names
    check_attention_interface(model.config, type(model))
    if "device_map" not in quantization:
        model.to(device, dtype if is_mxfp4(config) else None)  # dequantized to bfloat16
    model.eval()
    model = install_adapter(model, source, lora, dtype=dtype)
    use_plan_attention(model)
    if has_fp32_residual:
        use_fp32_residual(model)
    return model


def build_empty_model(
    path: str, *, dtype: torch.dtype, trust_remote_code: bool = False, base_path: str | None = None
) -> PreTrainedModel:
    """The model that `load_model` loads, without its weights, on the meta device."""
    config = load_config(path, trust_remote_code=trust_remote_code, base_path=base_path)
    attention = choose_attention(config)
    model = build_meta_model(
        config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
    ).eval()
    use_plan_attention(model)
    return train_all_weights(model)


def install_adapter(
    model: PreTrainedModel, source: ModelSource, lora: LoraSection | None, *, dtype: torch.dtype
) -> PreTrainedModel:
    """Merge the source's adapter; or with `lora` activate it, or a new one, as the only part that takes gradients."""
    if source.adapter is None and lora is None:
        return train_all_weights(model)
    from tunesmith.model.adapters import lora as adapters  # PEFT takes seconds to import

    if lora is None:
        assert source.adapter is not None
        return train_all_weights(adapters.merge_adapter(model, source.adapter))
    adapters.disable_cpu_repacking(model)
    place = Path(source.name_or_path, source.gguf_file or "")
    base = str(place.absolute()) if place.exists() else source.name_or_path
    if source.adapter is None:
        adapters.add_adapter(model, lora, base=base, dtype=dtype)
    else:
        adapters.load_adapter(model, source.adapter, lora, base=base, dtype=dtype)
    return model.eval()


def complete_gguf_tokenizer(file: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add what transformers before 5.24 leaves out: control and user-defined tokens, such as `<tool_call>`, which would
    be split like other text, and which token ends a reply."""
    from gguf import GGUFReader, TokenType  # an optional package

    reader = GGUFReader(file)
    tokens, types, end = (reader.get_field(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "eos_token_id"))
    if tokens is None or types is None:
        return
    kinds, known = np.array(types.contents()), tokenizer.added_tokens_decoder
    for kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
        missing = [
            str(tokens.contents(index)) for index in np.flatnonzero(kinds == kind).tolist() if index not in known
        ]
        is_special = kind == TokenType.CONTROL
        tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False) for text in missing], is_special)
    if end is not None:
        tokenizer.eos_token = str(tokens.contents(end.contents()))


def check_gguf_tensors(file: Path, model: PreTrainedModel) -> None:
    """Refuse a file of which transformers has read less into the model than it holds: it drops tensors that its table
    of names lacks, and rotary scaling."""
    from gguf import GGUFReader  # an optional package

    reader = GGUFReader(file)
    num_found = sum(int(tensor.n_elements) for tensor in reader.tensors)
    num_read = sum({weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}.values())
    if num_found != num_read:
        raise ModelError(
            f"{file.name} has {num_found:,} numbers and the {model.config.model_type} model that transformers reads "
            f"from it {num_read:,}: tensors are left out (biases, rotary factors), or the file is one of several parts"
        )
    scaling = read_gguf_text(reader, f"{read_gguf_text(reader, 'general.architecture')}.rope.scaling.type")
    if scaling not in (None, "none", (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")):
        raise ModelError(
            f"{file.name} scales its rotary embeddings ({scaling}) and transformers reads none from it: the model "
            "would answer differently. Take the model that the file was converted from"
        )


def read_gguf_text(reader: Any, key: str) -> str | None:
    """A metadata field of a GGUF file."""
    field = reader.get_field(key)
    return None if field is None else str(field.contents())


def is_mxfp4(config: PretrainedConfig) -> bool:
    """Whether the experts are stored in four bits, as those of gpt-oss; they are dequantized when they are loaded."""
    return (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4"


def check_stored_weights(path: str, config: PretrainedConfig, lora: LoraSection | None = None) -> None:
    """Refuse quantized weights without an adapter: they can neither be trained nor saved. MXFP4 is dequantized."""
    quantization = getattr(config, "quantization_config", None)
    if quantization and lora is None and not is_mxfp4(config):
        raise ModelError(
            f"{path!r} holds quantized weights ({quantization.get('quant_method')}), which work under an adapter "
            "(model.lora) alone: take the model before quantization"
        )


def clear_quantization(model: PreTrainedModel) -> None:
    """Unmark weights read from GGUF or MXFP4 as quantized: they are dequantized, but could not be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def check_section(section: ModelSection) -> PretrainedConfig:
    """Check everything in a model section that can be checked without weights; return the model's configuration."""
    device = resolve_device(section.device)
    config = check_model(
        section.path,
        max_model_len=section.max_model_len,
        trust_remote_code=section.trust_remote_code,
        base_path=section.base_path,
        lora=section.lora,
    )
    load_section_tokenizer(section)
    check_residual_dtype(section, config)
    if section.numerics == "exact":
        check_exact(config, device, resolve_dtype(section.dtype, device))
    if section.lora is not None:
        adapter = find_model(section.path, section.base_path).adapter
        if adapter is not None:
            check_same_adapter(adapter, section.lora)
        if section.lora.quantization == "nf4":
            from tunesmith.model.adapters.lora import check_quantization  # PEFT takes seconds to import

            check_quantization(config, device)
    return config


def check_residual_dtype(section: ModelSection, config: PretrainedConfig) -> None:
    """Refuse `residual_dtype=float32` for a model, the policy or an extra model, that does not support it."""
    dtype = resolve_dtype(section.dtype, resolve_device(section.device))
    if section.residual_dtype == "float32" and dtype != torch.float32:
        check_fp32_residual(config, trust_remote_code=section.trust_remote_code)


def check_model(
    path: str,
    *,
    max_model_len: int = 0,
    trust_remote_code: bool = False,
    base_path: str | None = None,
    lora: LoraSection | None = None,
) -> PretrainedConfig:
    """Check everything about a model that can be checked without weights; return its configuration."""
    config = load_config(path, trust_remote_code=trust_remote_code, base_path=base_path)
    check_architecture(config)
    check_stored_weights(path, config, lora)
    check_lengths(config, max_model_len)
    adapter = find_model(path, base_path).adapter
    if adapter is not None:
        check_adapter(adapter, config)
    return config


def check_lengths(config: PretrainedConfig, max_model_len: int) -> None:
    """Refuse a context longer than the model's maximum number of positions."""
    num_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if num_positions is not None and max_model_len > num_positions:
        raise ModelError(
            f"model.max_model_len={max_model_len} is longer than the model's {num_positions} positions; "
            f"set it to {num_positions} or less"
        )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer with ids beyond the model's embeddings."""
    num_embeddings = len(model.get_input_embeddings().weight)
    largest = max(tokenizer.get_vocab().values())
    if largest >= num_embeddings:
        raise ModelError(
            f"the tokenizer has ids up to {largest} but the model has {num_embeddings} embeddings; "
            "model and tokenizer do not belong together"
        )


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Read by torch when memory of a GPU is first allocated."""
ROUNDED_MIB = tuple(2**power for power in range(4, 11))
"""Tensors from the first of these to twice the last are rounded: activations, and seldom weights."""
DIVISIONS = 16
"""Sizes between two powers of two; a tensor takes at most a 16th more."""
SETTING = f"roundup_power2_divisions:[8:1,{','.join(f'{size}:{DIVISIONS}' for size in ROUNDED_MIB)},>:1]"


def round_allocations(environment: MutableMapping[str, str] | None = None) -> None:
    """Let torch's allocator round large sizes, unless the environment has settings for it."""
    variables = os.environ if environment is None else environment
    if not any(variables.get(name) for name in VARIABLES):
        variables[VARIABLES[0]] = SETTING
