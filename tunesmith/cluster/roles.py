"""Which ranks train, and which only sample (`cluster.sampling_ranks`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tunesmith.cluster.ranks import Ranks, rank_errors

BUCKET_BYTES = 2**28
"""Most bytes of weights that one collective sends; a larger parameter is sent alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRoles:
    """The ranks of a run by what they do."""

    world: Ranks
    """All ranks."""
    trainers: Ranks
    """The ranks that train; on a rank that only samples the value has no meaning. All ranks, if all sample too."""
    samplers: Sequence[int] = ()
    """The ranks that only sample, the last ones of the world."""
    weights: Any = None
    """Process group of the first rank and the samplers, for weights."""

    @property
    def is_sampler(self) -> bool:
        return self.world.rank in self.samplers

    def send_weights(self, parameters: Sequence[Tensor]) -> None:
        """Overwrite parameters on the samplers with those of the first rank; these ranks call this together."""
        # in buckets: a collective for each small parameter would cost more than its transfer, one for all of them a
        # copy of the model
        for bucket in split_weights(parameters):
            flat = torch.cat([each.data.flatten() for each in bucket])
            with rank_errors():
                dist.broadcast(flat, src=0, group=self.weights)
            if self.is_sampler:
                for each, values in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                    each.data.copy_(values.view_as(each))
        if parameters[0].is_cuda:
            torch.cuda.synchronize(parameters[0].device)


def split_weights(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters in buckets of one dtype, in their order."""
    buckets: list[list[Tensor]] = []
    num_bytes = 0
    for each in parameters:
        size = each.numel() * each.element_size()
        if not buckets or buckets[-1][0].dtype != each.dtype or num_bytes + size > BUCKET_BYTES:
            buckets.append([])
            num_bytes = 0
        buckets[-1].append(each)
        num_bytes += size
    return buckets


def split_ranks(world: Ranks, *, num_samplers: int, timeout_s: float) -> RankRoles:
    """Let the last `num_samplers` ranks only sample; all ranks call this."""
    if num_samplers == 0:
        return RankRoles(world=world, trainers=world)
    num_trainers = world.world_size - num_samplers
    trainers, samplers = list(range(num_trainers)), list(range(num_trainers, world.world_size))
    timeout = timedelta(seconds=timeout_s)
    backend = "nccl" if torch.device(world.device).type == "cuda" else "gloo"
    own = Ranks()
    with rank_errors():
        weights = dist.new_group([0, *samplers], backend=backend, timeout=timeout)
        if num_trainers > 1:  # every rank must take part in making a group, members or not
            tensors = dist.new_group(trainers, backend=backend, timeout=timeout)
            objects = dist.new_group(trainers, backend="gloo", timeout=timeout)
            if world.rank < num_trainers:
                own = replace(world, world_size=num_trainers, tensors=tensors, objects=objects)
    return RankRoles(world=world, trainers=own, samplers=samplers, weights=weights)
