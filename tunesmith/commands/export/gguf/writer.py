"""Writes a loaded model and its tokenizer as a GGUF file. The only file that imports the `gguf` package.

Matrices are stored as f32, f16 or q8_0; vectors (norms, biases) as f32, like llama.cpp does. Tensors are converted one
at a time, so peak memory is the model plus one tensor. Other quantizations are made by llama.cpp from an f32 file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf import get_tensor_name_map as build_name_map
from gguf.quants import quantize
from transformers import PreTrainedModel

from tunesmith.commands.export.gguf.architecture import GgufArchitecture
from tunesmith.commands.export.gguf.files import QUANTIZED_BY_LLAMA_CPP, GgufPlan
from tunesmith.commands.export.gguf.vocabulary import GgufVocabulary
from tunesmith.errors import ModelError
from tunesmith.storage import storage_errors

F32, F16, Q8_0 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0
MATRIX_TYPES = {"f32": F32, "f16": F16, "q8_0": Q8_0}
FILE_TYPES = {"f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16, "q8_0": LlamaFileType.MOSTLY_Q8_0}
QUANTIZATION_VERSION = 2
ROPE_FACTORS = "rope_freqs.weight"
ROTATED_ROWS = re.compile(r"\.(attn_q|attn_k)\.(weight|bias)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor to write."""

    name: str
    source: torch.Tensor
    storage: GGMLQuantizationType
    num_rotated_heads: int
    """Number of heads whose rows are reordered into rotary pairs; 0 keeps the order."""


def write_gguf_files(plan: GgufPlan, model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Write one file per type into the new folder; return the file names by type."""
    with storage_errors(folder, "write"):
        folder.mkdir()
        quantized = [kind for kind in plan.types if kind in QUANTIZED_BY_LLAMA_CPP]
        written = [kind for kind in plan.types if kind not in quantized]
        for kind in dict.fromkeys([*written, *(["f32"] if quantized else [])]):
            write_gguf(folder / plan.file_name(kind), model, plan, file_type=kind)
        f32_file = folder / plan.file_name("f32")
        for kind in quantized:
            from tunesmith.commands.export.llama_cpp import quantize_file  # needs an optional package

            quantize_file(f32_file, folder / plan.file_name(kind), file_type=kind, num_threads=plan.num_threads)
        if quantized and "f32" not in written:
            f32_file.unlink()
    return {kind: plan.file_name(kind) for kind in plan.types}


def write_gguf(path: Path, model: PreTrainedModel, plan: GgufPlan, *, file_type: str) -> None:
    """Write the file; raises OSError on disk errors and ModelError for values out of the range of f16."""
    entries = list(plan_tensors(model, plan.architecture, MATRIX_TYPES[file_type]))
    writer = GGUFWriter(path=None, arch=plan.architecture.name)
    try:
        add_metadata(writer, plan, file_type=file_type)
        for entry in entries:
            add_tensor_info(writer, entry)
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(convert_tensor(entry))
        writer.flush()
    finally:
        writer.close()


def add_metadata(writer: GGUFWriter, plan: GgufPlan, *, file_type: str) -> None:
    writer.add_type("model")
    writer.add_name(plan.name)
    if plan.license is not None:
        writer.add_license(plan.license)
    writer.add_file_type(FILE_TYPES[file_type])
    if file_type not in {"f32", "f16"}:
        writer.add_quantization_version(QUANTIZATION_VERSION)
    for key, value in plan.architecture.fields.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{plan.architecture.name}.{key}", value)
    add_vocabulary(writer, plan.vocabulary)


def add_vocabulary(writer: GGUFWriter, vocabulary: GgufVocabulary) -> None:
    """Write the tokenizer fields; `gpt2` is GGUF's name for byte-level BPE."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.pre_tokenizer)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.token_types))
    writer.add_token_merges(list(vocabulary.merges))
    for role, index in vocabulary.special_ids.items():
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_bos_token(vocabulary.has_bos)
    writer.add_add_eos_token(vocabulary.has_eos)
    templates = vocabulary.chat_templates.items()
    writer.add_chat_template([{"name": name, "template": text} for name, text in templates])


def plan_tensors(
    model: PreTrainedModel, architecture: GgufArchitecture, matrix_type: GGMLQuantizationType
) -> Iterator[TensorEntry]:
    """All tensors of the file in the model's order; raises ModelError for one that has no name in GGUF."""
    known = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
    names = build_name_map(known[architecture.name], architecture.num_layers)
    if architecture.rope_factors is not None:
        yield TensorEntry(
            name=ROPE_FACTORS, source=torch.tensor(architecture.rope_factors), storage=F32, num_rotated_heads=0
        )
    embeddings, heads = model.get_input_embeddings().weight, architecture.rotated_heads
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and tensor.data_ptr() == embeddings.data_ptr():
            continue  # llama.cpp takes the embeddings for a head that is not in the file
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ModelError(f"GGUF has no name for the model's tensor {key}; remove gguf from formats")
        rows = ROTATED_ROWS.search(name)
        yield TensorEntry(
            name=name,
            source=tensor,
            storage=choose_storage(tensor, matrix_type),
            num_rotated_heads=heads.get(rows[1], 0) if rows else 0,
        )


def choose_storage(tensor: torch.Tensor, matrix_type: GGMLQuantizationType) -> GGMLQuantizationType:
    """f32 for vectors; f16 for matrices whose rows are no multiple of the quantization block, as in llama.cpp."""
    if tensor.dim() == 1:
        return F32
    block_size, _ = GGML_QUANT_SIZES[matrix_type]
    return matrix_type if tensor.shape[-1] % block_size == 0 else F16


def add_tensor_info(writer: GGUFWriter, entry: TensorEntry) -> None:
    """Write a tensor's metadata; the data follow later in the same order."""
    block_size, block_bytes = GGML_QUANT_SIZES[entry.storage]
    num_bytes = entry.source.numel() // block_size * block_bytes
    writer.add_tensor_info(
        entry.name, list(entry.source.shape), np.dtype(np.float32), num_bytes, raw_dtype=entry.storage
    )


def convert_tensor(entry: TensorEntry) -> np.ndarray:
    """The tensor's values in their storage format."""
    values = entry.source.detach().to(device="cpu", dtype=torch.float32)
    if entry.num_rotated_heads:
        values = pair_rotated_rows(values, num_heads=entry.num_rotated_heads)
    largest = values.abs().max().item()
    if not math.isfinite(largest):
        raise ModelError(f"{entry.name} has values that are not finite")
    if entry.storage == F16 and largest > torch.finfo(torch.float16).max:
        raise ModelError(f"{entry.name} has values up to {largest:g}, beyond f16; set gguf_types to f32")
    return np.ascontiguousarray(quantize(values.contiguous().numpy(), entry.storage))


def pair_rotated_rows(values: torch.Tensor, *, num_heads: int) -> torch.Tensor:
    """Reorder rows of each head from halves (0, 1, .., d/2, ..) to pairs (0, d/2, 1, d/2+1, ..); [heads * d, ...]."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)
