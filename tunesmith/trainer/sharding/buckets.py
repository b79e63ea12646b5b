"""Buckets of parameters that one collective sums or gathers.

Each parameter is cut into as many equal parts as there are ranks, padded with zeros. Buckets hold parameters in reverse
order, which is about the order of the backward pass.

Axes: R ranks, S elements of a rank's share of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tunesmith.cluster.ranks import split_by_size, wait_for

T = TypeVar("T")

BUCKET_ELEMENTS = 2**25
"""Elements of one collective; a larger parameter is a bucket of its own."""


Bucket = Mapping[str, int]
"""Parameters that one collective sums or gathers: the elements of a rank's part of each, padding included, by its name.
All have one dtype, and so have their gradients."""


def build_buckets(parameters: Mapping[str, nn.Parameter], world_size: int) -> list[Bucket]:
    """Buckets of the parameters in reverse order."""
    last_first = list(parameters.items())[::-1]
    split = split_by_size(last_first, lambda named: (named[1].dtype, named[1].numel()), limit=BUCKET_ELEMENTS)
    return [{name: -(-parameter.numel() // world_size) for name, parameter in part} for part in split]


def pack_gradients(bucket: Bucket, parameters: Mapping[str, nn.Parameter], world_size: int) -> Tensor:
    """The gradients of the parts [R, S], one after the other, so that row r is what rank r keeps; they are freed.

    A parameter without a gradient on this rank adds zeros to the sum: the others' collective has its place, too.
    """
    first = parameters[next(iter(bucket))]
    dtype = torch.promote_types(first.dtype, torch.float32)
    whole_RS = torch.zeros(world_size, sum(bucket.values()), dtype=dtype, device=first.device)
    for name, target_RS in zip(bucket, whole_RS.split(list(bucket.values()), dim=1), strict=True):
        parameter = parameters[name]
        if parameter.grad is not None:
            target_RS.copy_(pad_flat(parameter.grad.flatten(), target_RS.numel()).view_as(target_RS))
            parameter.grad = None
    return whole_RS


def finish_one_behind(started: Iterable[tuple[Any, T]]) -> Iterator[T]:
    """Start the collectives one after the other, and wait for each only when the next has been started.

    So a bucket is packed while the one before it is on its way, and no more than two are in memory. The second element
    of a pair, which is returned, must hold the tensors of the collective: it reads and writes them until it ends.
    """
    previous: tuple[Any, T] | None = None
    for each in started:
        if previous is not None:
            wait_for(previous[0])
            yield previous[1]
        previous = each
    if previous is not None:
        wait_for(previous[0])
        yield previous[1]


def pad_flat(flat: Tensor, size: int) -> Tensor:
    return flat if flat.numel() == size else functional.pad(flat, (0, size - flat.numel()))
