"""Weights from this process's model to vLLM's: through handles of GPU memory, or on a CPU through a file.

The names, shapes and layout are those of a checkpoint; an adapter is merged into copies of the layers it adapts. vLLM
shards, fuses and casts what it receives in its own memory (its weight transfer engine `ipc`, or `reload_weights`).
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tunesmith.engine.vllm.connection import Connection

Transfer = Literal["ipc", "files"]

CHUNK_BYTES = 2**30
"""Weights that are copied and handed over at once; at least one tensor."""
BASE_LAYER = ".base_layer."


def iter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names as in a checkpoint, and tensors: the model's own, or merged with its adapter."""
    nothing: dict[str, Tensor] = {}
    if revert_weight_conversion(model, nothing) is nothing:
        return iter_merged(model)
    return iter(revert_weight_conversion(model, dict(iter_merged(model))).items())


def iter_merged(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The names of the model without its adapter, and merged weights, one at a time."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        weight = parameter.detach()
        if BASE_LAYER not in name:
            yield name, weight
            continue
        path, _, kind = name.partition(BASE_LAYER)
        if kind == "weight":
            weight = merge_layer(weight, model.get_submodule(path))
        yield f"{path}.{kind}", weight


@torch.no_grad()
def merge_layer(weight: Tensor, layer: Any) -> Tensor:
    """The weight of a layer plus its adapter's, added in float32."""
    merged = weight.float()
    for adapter in layer.active_adapters:
        merged = merged + layer.get_delta_weight(adapter).float()
    return merged.to(weight.dtype)


def push_files(connection: Connection, model: PreTrainedModel, folder: Path, *, timeout_s: float) -> None:
    """Write the weights into `folder` and let vLLM load them."""
    save_weights(model, folder)
    connection.call("reload", timeout_s=timeout_s, folder=str(folder))


def save_config(model: PreTrainedModel, folder: Path, *, transfer: Transfer) -> None:
    """Write the architecture for vLLM. Through files the head is a weight of its own: vLLM's CPU build packs it, and
    does not pack a tied one again when weights are loaded."""
    config = copy(model.config)
    if transfer == "files":
        config.tie_word_embeddings = False
    config.save_pretrained(folder)


def save_weights(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights as a checkpoint of one file, with a head of its own."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in iter_weights(model)}
    if model.config.tie_word_embeddings:
        head = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is head)
        tensors[f"{name}.weight"] = head.weight.detach().cpu().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def push_handles(
    connection: Connection, model: PreTrainedModel, devices: Sequence[torch.device], *, timeout_s: float
) -> None:
    """Copy the weights in chunks to every GPU of vLLM and hand over handles of the copies.

    vLLM may read a chunk until the next one is loaded, because the parts of a fused layer can be in both.
    """
    connection.call("start_update", timeout_s=timeout_s)
    previous: list[Tensor] = []
    for chunk in split_chunks(iter_weights(model)):
        copies = [{device: tensor.to(device, copy=True) for device in devices} for _, tensor in chunk]
        for device in {*devices, model.device}:
            torch.cuda.synchronize(device)
        handles = [{name_gpu(device): reduce_tensor(copy)[1] for device, copy in each.items()} for each in copies]
        connection.call(
            "update",
            timeout_s=timeout_s,
            names=[name for name, _ in chunk],
            dtype_names=[str(tensor.dtype).removeprefix("torch.") for _, tensor in chunk],
            shapes=[list(tensor.shape) for _, tensor in chunk],
            ipc_handles_pickled=base64.b64encode(pickle.dumps(handles)).decode(),
        )
        previous = [copy for each in copies for copy in each.values()]
    connection.call("finish_update", timeout_s=timeout_s)
    del previous
    torch.cuda.ipc_collect()


def split_chunks(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive weights of at most `CHUNK_BYTES`, or a single larger one."""
    chunk: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        if chunk and num_bytes + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
        chunk.append((name, tensor))
        num_bytes += tensor.nbytes
    if chunk:
        yield chunk


def name_gpu(device: torch.device) -> str:
    """The GPU's unique id, by which vLLM's workers find the handle of their own."""
    return str(torch.cuda.get_device_properties(device).uuid)
