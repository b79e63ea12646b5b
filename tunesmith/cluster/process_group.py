"""The process groups of a run, from the environment that torchrun sets, and which ranks train or only sample.

Each rank has two groups: tensors (NCCL on GPUs, gloo on CPUs) and Python objects (gloo). With `cluster.sampling_ranks`
the ranks that train have two of their own, and the first rank and those that only sample one for weights.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tunesmith.cluster.rank_info import RankInfo, watch_launcher
from tunesmith.cluster.ranks import Ranks, rank_errors, split_by_size
from tunesmith.errors import ConfigError, first_line

STORE_TIMEOUT_S = 20.0
"""Seconds that a rank tries to reach the store of torchrun's agent; the agent starts it before the rank."""


@contextmanager
def open_ranks(place: RankInfo, *, device: torch.device, timeout_s: float) -> Iterator[Ranks]:
    """Join the other ranks; `Ranks()` for a single process. `device` is this rank's.

    Collectives that wait longer than `timeout_s` fail, so a rank that hangs stops the others.
    """
    if place.world_size == 1:
        yield Ranks()
        return
    watch_launcher()
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_s)
    try:
        # all ranks wait here for each other, for the last one's imports too
        with terminated_at_once():
            check_store(min(timeout_s, STORE_TIMEOUT_S))
            dist.init_process_group(
                "nccl" if is_cuda else "gloo",
                rank=place.rank,
                world_size=place.world_size,
                timeout=timeout,
                device_id=device if is_cuda else None,
            )
            objects = dist.new_group(backend="gloo", timeout=timeout) if is_cuda else dist.group.WORLD
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"rank {place.rank} of {place.world_size} cannot join the others at MASTER_ADDR={place.address} "
            f"({first_line(error)}): check that every rank was started, that the port is free, and that the hosts "
            "reach each other"
        ) from error
    try:
        yield Ranks(
            rank=place.rank,
            world_size=place.world_size,
            device=device if is_cuda else torch.device("cpu"),
            tensors=dist.group.WORLD,
            objects=objects,
        )
    except BaseException:
        if not is_cuda:  # NCCL would wait for collectives that no other rank joins; the process is about to end
            dist.destroy_process_group()
        raise
    with rank_errors():
        dist.barrier(group=objects)  # no rank closes its connections while another still reads
    dist.destroy_process_group()


def check_store(timeout_s: float) -> None:
    """Raise if the store of torchrun's agent, where ranks meet, is gone: joining would wait for its whole timeout."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        timeout = timedelta(seconds=timeout_s)
        dist.TCPStore(address, port, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]


@contextmanager
def terminated_at_once() -> Iterator[None]:
    """Let SIGTERM end the process within: while it waits for other ranks in C++, no Python handler would run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


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
        for bucket in split_by_size(parameters, lambda each: (each.dtype, each.nbytes), limit=BUCKET_BYTES):
            flat = torch.cat([each.data.flatten() for each in bucket])
            with rank_errors():
                dist.broadcast(flat, src=0, group=self.weights)
            if self.is_sampler:
                for each, values in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                    each.data.copy_(values.view_as(each))
        if parameters[0].is_cuda:
            torch.cuda.synchronize(parameters[0].device)


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
