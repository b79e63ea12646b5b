"""LoRA adapters through PEFT: inject into a model, load, merge, save.

PEFT's layers replace linear layers inside the model; the model object stays the same, and engine and trainer run the
same forward. Only the adapter's factors take gradients. Files are in PEFT's format: `PeftModel.from_pretrained` reads
them. Importing this file imports PEFT and takes seconds, so other files import it lazily.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from copy import copy
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tunesmith.config import LoraSection
from tunesmith.errors import ModelError, StorageError
from tunesmith.model.adapters.adapter import KEY_PREFIX, build_meta_model, copy_state
from tunesmith.model.experts import ADAPTERS, find_expert_weights, find_routers
from tunesmith.model.source.fingerprint import compute_fingerprint
from tunesmith.model.source.resolve import ADAPTER_WEIGHTS, BASE_FINGERPRINT, AdapterFiles
from tunesmith.model.towers import list_towers
from tunesmith.storage import save_json

ADAPTER = "default"
"""PEFT's default adapter name; a model has one adapter."""
RANK_MULTIPLE = 8
"""Grouped products take rows of a multiple of 16 bytes; factors of other ranks are padded with zeros."""
MAX_QUANTIZATION_ERROR = 0.15
"""NF4's relative error on normally distributed weights is 0.09; kernels with misplaced scales are far above this."""


@torch.library.custom_op("tunesmith::copy_contiguous", mutates_args=())
def copy_contiguous(tensor: Tensor) -> Tensor:
    """A contiguous copy. Compiled layers give the result of `Tensor.contiguous` the strides of its input, of which
    grouped products refuse some.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


copy_contiguous.register_fake(lambda tensor: torch.empty_like(tensor, memory_format=torch.contiguous_format))
copy_contiguous.register_autograd(lambda ctx, grad: grad)


class _Factors(nn.Linear):
    """Low-rank factors of all experts, which `ExpertAdapter` reads. Not a plain linear layer: its forward never runs,
    so what replaces or records the forwards of linear layers must pass it over."""


class ExpertAdapter(ParamWrapper):
    """PEFT's adapter of a weight of all experts, in PEFT's names and files, which `run_experts` applies.

    PEFT's own forward builds the adapted weights of all experts, and autograd would keep them for every layer.
    """

    def forward(self, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        output: Tensor = self.base_layer(x, *args, **kwargs)
        return output

    def read_factors(self) -> tuple[Tensor, Tensor, float]:
        """Factors [E, C, R] and [E, R, O] and the scaling of their product."""
        down, up = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        rank = self.r[ADAPTER]
        down_ERC = down.view(self.num_experts, rank, -1)
        up_ERO = up.view(-1, rank, self.num_experts).permute(2, 1, 0)
        if num_added := -rank % RANK_MULTIPLE:
            down_ERC, up_ERO = (functional.pad(each, (0, 0, 0, num_added)) for each in (down_ERC, up_ERO))
        return down_ERC.transpose(1, 2), copy_contiguous(up_ERO), self.scaling[ADAPTER]


def use_expert_adapters(model: PreTrainedModel) -> None:
    """Let `run_experts` apply the adapters of experts."""
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = ExpertAdapter
            for factors in (module.lora_A[ADAPTER], module.lora_B[ADAPTER]):
                factors.__class__ = _Factors
            # in a plain dict: as a submodule, the adapter, which contains the experts, would be inside of them
            vars(module.get_base_layer()).setdefault(ADAPTERS, {})[module.parameter_name] = module


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


NO_OUT_PROJ = ("falcon_h1", "nemotron_h")
"""Model types in which PEFT refuses adapters of `out_proj`: kernels of Mamba read its weight alone."""


def add_adapter(model: PreTrainedModel, lora: LoraSection, *, base: str, dtype: torch.dtype) -> None:
    """Inject a new adapter; the model's outputs do not change until the adapter is trained."""
    targets, weights = resolve_targets(model, lora.target_modules)
    check_expert_dropout(lora, weights)
    towers = list_towers(model)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=lora.r,
        lora_dropout=lora.dropout,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        target_modules=targets,
        target_parameters=weights or None,
        exclude_modules=rf"({'|'.join(map(re.escape, towers))})\..*" if towers else None,
    )
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(lora.seed)
            inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"model.lora.target_modules={lora.target_modules!r}: {reason[:300]}") from error
    use_expert_adapters(model)
    set_adapter_dtype(model, dtype)


def load_adapter(
    model: PreTrainedModel, adapter: AdapterFiles, lora: LoraSection, *, base: str, dtype: torch.dtype
) -> None:
    """Inject an adapter from disk for further training, with the dropout of `lora` in place of its saved one."""
    attach_adapter(model, adapter, is_trainable=True)
    check_expert_dropout(lora, model.peft_config[ADAPTER].target_parameters or [])
    use_expert_adapters(model)
    model.peft_config[ADAPTER].base_model_name_or_path = base
    model.peft_config[ADAPTER].lora_dropout = lora.dropout
    for module in model.modules():
        if isinstance(layers := getattr(module, "lora_dropout", None), nn.ModuleDict) and ADAPTER in layers:
            layers[ADAPTER] = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
    set_adapter_dtype(model, dtype)


def check_expert_dropout(lora: LoraSection, weights: list[str]) -> None:
    """Refuse dropout on adapters of experts: it would have to drop inputs before they are multiplied by any factor."""
    if lora.dropout and weights:
        reason = f"adapters of experts ({', '.join(weights)}) have no dropout; set it to 0"
        raise ModelError(f"model.lora.dropout={lora.dropout:g}: {reason}")


def attach_adapter(model: PreTrainedModel, adapter: AdapterFiles, *, is_trainable: bool) -> PeftModel:
    """Inject an adapter from disk into the model in place; refuse one with missing tensors."""
    try:
        with warnings.catch_warnings():
            # PEFT reads an attribute that transformers has renamed, which is no concern of the user
            warnings.filterwarnings(
                "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
            )
            peft_model = PeftModel.from_pretrained(
                model, str(adapter.folder), adapter_name=ADAPTER, is_trainable=is_trainable
            )
        saved = load_file(adapter.folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the adapter {str(adapter.folder)!r} cannot be loaded: {reason[:300]}") from error
    state = read_adapter_state(model)
    if missing := sorted(state.keys() - saved.keys()):
        raise ModelError(f"the adapter {str(adapter.folder)!r} is incomplete: it has no {missing[0]}")
    # PEFT renames tensors of some families, and drops those that it then does not find (shared experts of Laguna)
    copy_state(saved, state)
    return peft_model


def merge_adapter(model: PreTrainedModel, adapter: AdapterFiles) -> PreTrainedModel:
    """Merge an adapter from disk into the weights of the model.

    A head that is the embedding matrix becomes a matrix of its own if one of the two is adapted: the adapter changes
    that one alone.
    """
    attached = attach_adapter(model, adapter, is_trainable=False)
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if any(isinstance(each, BaseTunerLayer) for each in (head, embeddings)) and head.weight is embeddings.weight:
        untie_head(model)
    merged: PreTrainedModel = attached.merge_and_unload(safe_merge=True)
    return merged


def untie_head(model: PreTrainedModel) -> None:
    """Give a head that is the embedding matrix a copy of its own."""
    head = model.get_output_embeddings()
    getattr(head, "base_layer", head).weight = nn.Parameter(head.weight.clone())
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False


def resolve_targets(model: PreTrainedModel, targets: str | tuple[str, ...]) -> tuple[str | list[str], list[str]]:
    """`target_modules` and `target_parameters` for PEFT; "attention" means the linear children of modules with a
    `layer_idx`. A name is that of linear layers or, if there are none, of weights of experts."""
    if isinstance(targets, tuple):
        return find_named_targets(model, targets)
    has_mamba = model.config.get_text_config().model_type in NO_OUT_PROJ
    refused = find_reserved_names(model) | ({"out_proj"} if has_mamba else set())
    if targets != "attention":
        weights = sorted({shorten(name) for name in find_expert_weights(model)})
        linear = {name.rpartition(".")[2] for name in list_linear_layers(model)}
        return (sorted(linear - refused), weights) if weights or refused else (targets, [])
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
    return sorted(names - refused), []


def set_adapter_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the trainable parameters to the activations' dtype; the optimizer keeps float32 masters of 16-bit ones."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def read_adapter_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapter's tensors, not copied, by the names in PEFT's files."""
    state: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=ADAPTER, save_embedding_layers=False)
    return {KEY_PREFIX + name: tensor for name, tensor in state.items()}


def save_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Write the adapter in PEFT's format, with a fingerprint of its base if the base has safetensors files."""
    config = copy(model.peft_config[ADAPTER])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    state = {name: tensor.contiguous() for name, tensor in read_adapter_state(model).items()}
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
    state = read_adapter_state(model)
    layout, saved_layout = ({name: (each.shape, each.dtype) for name, each in of.items()} for of in (state, saved))
    if layout != saved_layout:
        raise StorageError(f"{folder} does not hold the adapter of this model: layers, shapes or dtypes differ")
    copy_state(saved, state)


def shorten(name: str) -> str:
    """The last two parts of the name of a weight, such as experts.down_proj."""
    return ".".join(name.split(".")[-2:])


def list_linear_layers(model: PreTrainedModel, *, has_head: bool = False) -> list[str]:
    """Names of the linear layers of the text decoder, without routers, which stay frozen."""
    towers, others = tuple(f"{name}." for name in list_towers(model)), find_routers(model)
    if not has_head:
        others.append(model.get_output_embeddings())
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    return [name for name, module in layers if not name.startswith(towers) and module not in others]


def find_reserved_names(model: PreTrainedModel) -> set[str]:
    """Names of linear layers that PEFT, in models with experts, replaces by names of experts' weights and the router:
    those that the layers of single experts once had, and that shared experts still have."""
    names = {name.rpartition(".")[2] for name in list_linear_layers(model)}
    config = LoraConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(config, model, None)
    return names - set(config.target_modules)


def find_named_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The targets that name linear layers, and those that name weights of experts; refuse one that names neither, which
    PEFT ignores if another does."""
    known: tuple[list[str], list[str]] = (list_linear_layers(model, has_head=True), find_expert_weights(model))
    found: tuple[list[str], list[str]] = ([], [])
    reserved = find_reserved_names(model)
    for target in targets:
        kind = next((kind for kind in (0, 1) if any(f".{name}".endswith(f".{target}") for name in known[kind])), None)
        if kind is None:
            layers = ", ".join(sorted({name.rpartition(".")[2] for name in known[0]}))
            layers += f"; weights of its experts: {', '.join(sorted(set(map(shorten, known[1]))))}" if known[1] else ""
            reason = f"{type(model).__name__} has no linear layer {target!r}; its layers: {layers}"
            raise ModelError(f"model.lora.target_modules: {reason}")
        if kind == 0 and target.rpartition(".")[2] in reserved:
            raise ModelError(
                f"model.lora.target_modules: PEFT takes {target!r} for weights of experts in models of type "
                f"{model.config.model_type}, so its linear layers cannot be adapted; leave it out, or name "
                f"{' or '.join(sorted(set(map(shorten, known[1]))))}"
            )
        found[kind].append(target)
    return found
