"""Collectives over the ranks of a run.

A rank is one process with one GPU, or one CPU process. Tensors are reduced and gathered through NCCL on GPUs and gloo
on CPUs; Python objects always through gloo, so they do not wait for the device. `Ranks()` is a single process: every
method then returns at once and no process group exists.

A collective that waits longer than the timeout of its process group, or whose peer has exited, raises RankError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tunesmith.errors import RankError, first_line

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among the ranks of a run."""

    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    """Device of tensors in collectives."""
    tensors: Any = None
    """Process group of tensors; None for a single process."""
    objects: Any = None
    """Process group of Python objects; None for a single process."""

    @property
    def is_alone(self) -> bool:
        return self.world_size == 1

    @property
    def is_first(self) -> bool:
        """Whether this rank selects tasks, and writes files and the console."""
        return self.rank == 0

    def all_gather_objects(self, value: T) -> list[T]:
        """The values of all ranks, in order of rank, on every rank."""
        if self.is_alone:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        with rank_errors():
            dist.all_gather_object(gathered, value, group=self.objects)
        return cast(list[T], gathered)

    def is_any(self, value: bool) -> bool:
        """Whether the value is true on some rank."""
        return any(self.all_gather_objects(value))

    def gather_objects(self, value: T) -> list[T] | None:
        """The values of all ranks, in order of rank, on the first rank; None on the others."""
        if self.is_alone:
            return [value]
        gathered: list[Any] | None = [None] * self.world_size if self.is_first else None
        with rank_errors():
            dist.gather_object(value, gathered, dst=0, group=self.objects)
        return gathered

    def broadcast_object(self, value: T | None = None) -> T:
        """The value of the first rank, on every rank; others pass nothing."""
        if self.is_alone:
            return cast(T, value)
        values: list[Any] = [value]
        with rank_errors():
            dist.broadcast_object_list(values, src=0, group=self.objects)
        return cast(T, values[0])

    def scatter_objects(self, values: Sequence[T] | None = None) -> T:
        """The value for this rank; the first rank passes one for each rank, others pass nothing."""
        if self.is_alone:
            assert values is not None
            return values[0]
        received: list[Any] = [None]
        with rank_errors():
            dist.scatter_object_list(received, None if values is None else list(values), src=0, group=self.objects)
        return cast(T, received[0])

    def all_gather_columns(self, values_FE: np.ndarray) -> list[np.ndarray]:
        """The arrays [F, E] (float64) of all ranks, which may differ in E; on every rank."""
        if self.is_alone:
            return [values_FE]
        lengths = self.all_gather_objects(values_FE.shape[1])
        padded_FE = torch.zeros(values_FE.shape[0], max(lengths), dtype=torch.float64)
        padded_FE[:, : values_FE.shape[1]] = torch.from_numpy(values_FE)
        sent = padded_FE.to(self.device)
        gathered = torch.empty(self.world_size * sent.numel(), dtype=sent.dtype, device=self.device)
        self.all_gather(gathered, sent.flatten())
        parts = gathered.view(self.world_size, *padded_FE.shape).cpu().numpy()
        return [part[:, :length] for part, length in zip(parts, lengths, strict=True)]

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if not self.is_alone:
            with rank_errors():
                dist.all_reduce(tensor, group=self.tensors)
        return tensor

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the tensor with the first rank's."""
        if not self.is_alone:
            with rank_errors():
                dist.broadcast(tensor, src=0, group=self.tensors)

    def all_gather(self, gathered: Tensor, shard: Tensor, *, is_async: bool = False) -> Any:
        """Write the shards [S] of all ranks into `gathered` [R * S]; with `is_async` return a handle to wait for."""
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with rank_errors():
            return gather(gathered, shard, group=self.tensors, async_op=is_async)

    def reduce_scatter(self, shard: Tensor, whole: Tensor) -> Any:
        """Write this rank's part of the sum of `whole` [R * S] over ranks into `shard` [S]; a handle to wait for."""
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        with rank_errors():
            return reduce(shard, whole, group=self.tensors, async_op=True)


def split_by_size(items: Iterable[T], measure: Callable[[T], tuple[Any, int]], *, limit: int) -> Iterator[list[T]]:
    """Consecutive items of one kind, at most of size `limit` together, or a single larger one.

    `measure`: kind and size of an item. What is sent at once is split so: a transfer for each small item would cost
    more than the data, one for all of them a second copy of everything.
    """
    part: list[T] = []
    last_kind, total = None, 0
    for item in items:
        kind, size = measure(item)
        if part and (kind != last_kind or total + size > limit):
            yield part
            part, total = [], 0
        part.append(item)
        last_kind, total = kind, total + size
    if part:
        yield part


def count_ranks() -> int:
    """Number of ranks that this process has joined; 1 if it has joined none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def rank_errors() -> Iterator[None]:
    """Raise RankError instead of the error of a collective whose peer has exited or does not answer."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise RankError(
            "another rank has ended or did not answer within cluster.timeout_s "
            f"({first_line(error)}): its own message says why; resume the run from its last checkpoint with --resume"
        ) from error


def wait_for(work: Any) -> None:
    """Wait for an asynchronous collective; on a GPU only the device waits."""
    with rank_errors():
        work.wait()
