"""Buckets of parameters that one collective sums or gathers.

Each parameter is cut into as many equal parts as there are ranks, padded with zeros. Buckets hold parameters in reverse
order, which is about the order of the backward pass.

Axes: R ranks, S elements of a rank's share of a bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

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


def fill_rows(whole_RS: Tensor, parts: Sequence[Shard], parameters: Mapping[str, nn.Parameter]) -> None:
    """Write the gradients of the parts, one after the other, so that row r is what rank r keeps; they are freed.

    A parameter without a gradient keeps what is there.
    """
    start = 0
    for part in parts:
        parameter = parameters[part.name]
        if parameter.grad is not None:
            target_RS = whole_RS[:, start : start + part.size]
            target_RS.copy_(pad_flat(parameter.grad.flatten(), target_RS.numel()).view_as(target_RS))
            parameter.grad = None
        start += part.size


def pad_flat(flat: Tensor, size: int) -> Tensor:
    return flat if flat.numel() == size else functional.pad(flat, (0, size - flat.numel()))
