"""Weights from this process's model to vLLM's: through handles of GPU memory, or on a CPU through a file.

The names, shapes and layout are those of a checkpoint; an adapter is merged into copies of the layers it adapts. vLLM
shards, fuses and casts what it receives in its own memory (`receiver.py`).
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tunesmith.cluster.ranks import split_by_size
from tunesmith.engine.vllm.process import Connection

SHARDED_PREFIX = "FSDP"
"""Start of the name of a class that FSDP2 has put in place of a module's own."""
CHUNK_BYTES = 2**30
"""Weights that are copied and handed over at once; at least one tensor."""
BASE_LAYER = ".base_layer."
GatherWeights = Callable[[], Iterator[tuple[str, Tensor]]]
"""The weights of a model by name, one at a time, where they are not those of the module in this process."""


def iter_weights(model: PreTrainedModel, gather: GatherWeights | None = None) -> Iterator[tuple[str, Tensor]]:
    """Names as in a checkpoint, and tensors: the model's own, or merged with its adapter, or gathered."""
    nothing: dict[str, Tensor] = {}
    weights = iter_merged(model) if gather is None else gather()
    if revert_weight_conversion(model, nothing) is nothing:
        return weights
    if gather is not None:
        weights = ((name, tensor.cpu()) for name, tensor in weights)  # a GPU does not hold them all
    return iter(revert_weight_conversion(model, dict(weights)).items())


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


def push_weights(
    connection: Connection,
    model: PreTrainedModel,
    devices: Sequence[torch.device] | None,
    folder: Path,
    *,
    timeout_s: float,
    gather: GatherWeights | None,
) -> None:
    """Let vLLM take the model's weights: on its GPUs `devices`, or with None through a file in `folder`."""
    weights = iter_weights(model, gather)
    connection.call("start_push", timeout_s=timeout_s)
    if devices is None:
        path = folder / "weights.safetensors"
        save_weights(model, path, weights)
        connection.call("receive_push", timeout_s=timeout_s, names=[], handles=None, path=str(path))
        path.unlink()
    else:
        push_handles(connection, weights, devices, own=model.device, timeout_s=timeout_s)
    connection.call("finish_push", timeout_s=timeout_s)
    if devices is not None:
        torch.cuda.ipc_collect()


def save_config(model: PreTrainedModel, folder: Path, *, has_own_head: bool) -> None:
    """Write the architecture for vLLM; `has_own_head`: with an LM head that is not tied to the embeddings.

    The config of a model that was not loaded from a checkpoint names no class, and vLLM would take it for a model
    without a head.
    """
    config = copy(model.config)
    config.architectures = [type(model).__name__.removeprefix(SHARDED_PREFIX)]
    if has_own_head:
        config.tie_word_embeddings = False
    config.save_pretrained(folder)


def save_weights(model: PreTrainedModel, path: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Write the weights as a checkpoint of one file, with a head of its own: vLLM's CPU build packs the head, and does
    not pack a tied one again when weights are loaded."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in weights}
    if model.config.tie_word_embeddings:
        head = model.get_output_embeddings()
        name = next(name for name, module in model.named_modules() if module is head)
        tensors[f"{name}.weight"] = head.weight.detach().cpu().clone()
    save_file(tensors, path, metadata={"format": "pt"})


def push_handles(
    connection: Connection,
    weights: Iterator[tuple[str, Tensor]],
    devices: Sequence[torch.device],
    *,
    own: torch.device,
    timeout_s: float,
) -> None:
    """Copy the weights in chunks to every GPU of vLLM and hand over handles of the copies.

    A copy's memory is free again once both sides have dropped it: vLLM keeps the parts of a fused layer until it has
    them all.
    """
    for chunk in split_chunks(weights):
        copies = [{device: tensor.to(device, copy=True) for device in devices} for _, tensor in chunk]
        # vLLM's workers read the copies from other processes, which know nothing of the streams that write them here
        for device in {*devices, own}:
            torch.cuda.synchronize(device)
        # a worker finds the handle of its GPU by the GPU's unique id
        names = {device: str(torch.cuda.get_device_properties(device).uuid) for device in devices}
        handles = [{names[device]: reduce_tensor(copy)[1] for device, copy in each.items()} for each in copies]
        connection.call(
            "receive_push",
            timeout_s=timeout_s,
            names=[name for name, _ in chunk],
            handles=base64.b64encode(pickle.dumps(handles)).decode(),
            path=None,
        )


def split_chunks(weights: Iterator[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive weights of at most `CHUNK_BYTES`, or a single larger one."""
    return split_by_size(weights, lambda named: (None, named[1].nbytes), limit=CHUNK_BYTES)
