"""Models whose decoder layers are sharded over ranks with FSDP2 (Zhao et al., 2023; `torch.distributed.fsdp`).

A layer's weights are gathered before its forward and before its backward, and freed after both; its gradients are
summed with reduce-scatter. The shards of a model that is trained in 16 bits are the float32 masters themselves, and
are rounded when they are gathered. Embeddings, head and final norm stay whole on every rank: they are used outside of
the layers, for each chunk of logits.

Loading takes one layer at a time: the first rank has the weights in CPU memory, others may have a model on the meta
device, and no device ever holds more than one whole layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tunesmith.cluster.ranks import Ranks, rank_errors
from tunesmith.errors import ModelError
from tunesmith.trainer.optimizer import build_master, is_wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a model is sharded."""

    ranks: Ranks
    dtype: torch.dtype
    """The type in which the layers compute, and in which weights are sent to samplers and saved."""


_SHARDINGS: WeakKeyDictionary[nn.Module, Sharding] = WeakKeyDictionary()


def find_sharding(model: nn.Module) -> Sharding | None:
    """How the model is sharded; None if every rank has it whole."""
    return _SHARDINGS.get(model)


@torch.no_grad()
def shard_model(model: PreTrainedModel, ranks: Ranks, device: torch.device) -> None:
    """Move the model to the devices of the ranks and shard its decoder layers; all ranks call this.

    The weights are those of the first rank. Only a model that takes gradients has float32 shards. Every weight is one
    broadcast, so ranks must go through layers, other parameters and buffers in the same order: that of the modules.
    """
    model.tie_weights()  # moving a model to the meta device unties them
    dtype, decoder = model.dtype, model.get_decoder()
    layers = find_decoder_layers(model, dtype)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    seeds = {name: seed for seed, name in enumerate(trained)}  # as `MasterAdamW`: equal masters on one and many ranks
    mesh = DeviceMesh.from_group(ranks.tensors, device.type)
    is_narrow = bool(trained) and dtype.itemsize < torch.float32.itemsize
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if is_narrow else None,
        reduce_dtype=torch.float32 if is_narrow else None,
        cast_forward_inputs=False,
    )
    for prefix, layer in layers.items():
        for name in [name for name, _ in layer.named_parameters()]:
            _place_parameter(model, f"{prefix}.{name}", ranks, device, seed=seeds.get(f"{prefix}.{name}"))
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        assert isinstance(layer, FSDPModule)
        # the weights of the loss are those of the whole update: gradients of ranks are summed, not averaged
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    for name in whole:
        _place_parameter(model, name, ranks, device, seed=None)
    for name in [name for name, _ in model.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        module._buffers[leaf] = _receive(module._buffers[leaf], ranks, device)
    model.tie_weights()  # the placed parameters are new objects
    # the root lets layers share streams: one is gathered while the one before it runs; its own weights stay whole
    ignored = {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)}
    fully_shard(decoder, mesh=mesh, ignored_params=ignored)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the memory of whole layers
    _SHARDINGS[model] = Sharding(ranks=ranks, dtype=dtype)


def find_decoder_layers(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, nn.Module]:
    """The decoder layers by name; ModelError for an architecture that cannot be sharded by layer."""
    layers: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)
    }
    if not layers:
        raise ModelError(f"{type(model).__name__} has no decoder layers that cluster.has_sharded_weights can shard")
    dtypes = {parameter.dtype for layer in layers.values() for parameter in layer.parameters()}
    if dtypes != {dtype}:
        raise ModelError(
            f"the layers of {type(model).__name__} have weights in {', '.join(sorted(map(str, dtypes)))}, and "
            "cluster.has_sharded_weights needs one dtype: remove it"
        )
    return layers


def iter_whole_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name, gathered one at a time; all ranks must iterate to the end.

    Weights have the model's dtype, and the values that it computes with.
    """
    for name, parameter in model.named_parameters():
        yield name, gather_weight(model, parameter)


@torch.no_grad()
def gather_weight(model: PreTrainedModel, parameter: Tensor) -> Tensor:
    """The whole parameter; the parameter itself if it is not sharded."""
    sharding = find_sharding(model)
    if sharding is None or not isinstance(parameter, DTensor):
        return parameter.detach()
    with rank_errors():
        whole: Tensor = parameter.detach().to(sharding.dtype).full_tensor()  # type: ignore[attr-defined]
    return whole


def gather_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """As `model.state_dict()` of the whole model, on the CPU; the other ranks must run `iter_whole_weights`."""
    weights = model.named_parameters()
    gathered = {
        id(weight): whole.cpu() for (_, weight), (_, whole) in zip(weights, iter_whole_weights(model), strict=True)
    }
    return {name: gathered.get(id(tensor), tensor).cpu() for name, tensor in model.state_dict(keep_vars=True).items()}


@torch.no_grad()
def load_state(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Copy the first rank's state of the whole model into the parameters of all ranks; others pass anything."""
    sharding = find_sharding(model)
    assert sharding is not None
    ranks = sharding.ranks
    for name, target in model.state_dict(keep_vars=True).items():
        whole = torch.empty(target.shape, dtype=sharding.dtype if isinstance(target, DTensor) else target.dtype)
        whole = _receive(state[name] if ranks.is_first else whole, ranks, target.device)
        if isinstance(target, DTensor):
            local = get_local(target)
            # the last ranks may have fewer rows
            start = min(ranks.rank * -(-target.shape[0] // target.device_mesh.size()), target.shape[0])
            local.copy_(whole[start : start + local.shape[0]])
        else:
            target.copy_(whole)


def get_local(parameter: Tensor) -> Tensor:
    """This rank's rows of a sharded parameter; shares its memory."""
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        local: Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
    return local


def is_narrow(model: nn.Module, parameter: Tensor) -> bool:
    """Whether the model computes with 16-bit values of the parameter, which then has a separate float32 master."""
    sharding = find_sharding(model)
    if sharding is None or not isinstance(parameter, DTensor):
        return not is_wide(parameter)  # type: ignore[arg-type]
    return sharding.dtype.itemsize < torch.float32.itemsize


def _place_parameter(
    model: PreTrainedModel, name: str, ranks: Ranks, device: torch.device, *, seed: int | None
) -> None:
    """Replace a parameter by that of the first rank, on this rank's device; with a seed by its float32 master."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    given = module.get_parameter(leaf)
    placed = nn.Parameter(_receive(given.detach(), ranks, device), requires_grad=given.requires_grad)
    if seed is not None and not is_wide(placed):
        placed = nn.Parameter(build_master(placed, seed=seed).detach())
    setattr(module, leaf, placed)


def _receive(tensor: Tensor | None, ranks: Ranks, device: torch.device) -> Tensor:
    """The first rank's tensor, on this rank's device."""
    assert tensor is not None
    received = tensor.to(device).contiguous() if ranks.is_first else torch.empty_like(tensor, device=device)
    ranks.broadcast(received)
    return received
