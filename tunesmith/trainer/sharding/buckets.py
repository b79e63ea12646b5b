"""Buckets of parameters that one collective sums or gathers.

Each parameter is cut into as many equal parts as there are ranks, padded with zeros. Buckets hold parameters in reverse
order, which is about the order of the backward pass.

Axes: R ranks, S elements of a rank's share of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tunesmith.cluster.ranks import wait_for

T = TypeVar("T")

BUCKET_ELEMENTS = 2**25
"""Elements of one collective; a larger parameter is a bucket of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Place of a parameter in its bucket."""

    name: str
    start: int
    """Offset of the part in a rank's share of the bucket."""
    size: int
    """Elements of a rank's part, padding included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that one collective sums or gathers; all have one dtype, and so have their gradients."""

    parts: tuple[Shard, ...]

    @property
    def size(self) -> int:
        """Elements of a rank's share."""
        return self.parts[-1].start + self.parts[-1].size


def build_buckets(parameters: Mapping[str, nn.Parameter], world_size: int) -> list[Bucket]:
    """Buckets of the parameters in reverse order."""
    buckets: list[list[Shard]] = []
    dtype, num_elements = None, 0
    for name, parameter in reversed(list(parameters.items())):
        if not buckets or parameter.dtype != dtype or num_elements + parameter.numel() > BUCKET_ELEMENTS:
            buckets.append([])
            dtype, num_elements = parameter.dtype, 0
        start = buckets[-1][-1].start + buckets[-1][-1].size if buckets[-1] else 0
        buckets[-1].append(Shard(name=name, start=start, size=-(-parameter.numel() // world_size)))
        num_elements += parameter.numel()
    return [Bucket(parts=tuple(parts)) for parts in buckets]


def pack_gradients(parts: Sequence[Shard], parameters: Mapping[str, nn.Parameter], world_size: int) -> Tensor:
    """The gradients of the parts [R, S], one after the other, so that row r is what rank r keeps; they are freed.

    A parameter without a gradient on this rank adds zeros to the sum: the others' collective has its place, too.
    """
    first = parameters[parts[0].name]
    dtype, size = torch.promote_types(first.dtype, torch.float32), sum(part.size for part in parts)
    whole_RS = torch.zeros(world_size, size, dtype=dtype, device=first.device)
    start = 0
    for part in parts:
        parameter = parameters[part.name]
        if parameter.grad is not None:
            target_RS = whole_RS[:, start : start + part.size]
            target_RS.copy_(pad_flat(parameter.grad.flatten(), target_RS.numel()).view_as(target_RS))
            parameter.grad = None
        start += part.size
    return whole_RS


def finish_one_behind(started: Iterable[tuple[Any, T]]) -> Iterator[T]:
    """Start the collectives one after the other, and wait for each only when the next has been started.

    So a bucket is packed while the one before it is on its way, and no more than two are in memory. The second element
    of a pair, which is returned, must hold the tensors of the collective: it reads and writes them until it ends.
    """
    previous: tuple[Any, T] | None = None
    for each in started:
        if previous is not None:
            wait_for([previous[0]])
            yield previous[1]
        previous = each
    if previous is not None:
        wait_for([previous[0]])
        yield previous[1]


def pad_flat(flat: Tensor, size: int) -> Tensor:
    return flat if flat.numel() == size else functional.pad(flat, (0, size - flat.numel()))
