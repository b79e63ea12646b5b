"""The process groups of a run, from the environment that torchrun sets.

Each rank has two groups: tensors (NCCL on GPUs, gloo on CPUs) and Python objects (gloo).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from tunesmith.cluster.rank_errors import watch_launcher
from tunesmith.cluster.rank_info import RankInfo
from tunesmith.cluster.ranks import Ranks
from tunesmith.errors import ConfigError

STORE_TIMEOUT_S = 20.0
"""Seconds that a rank tries to reach the store of torchrun's agent, which is older than the rank."""


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
        cause = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"rank {place.rank} of {place.world_size} cannot join the others at MASTER_ADDR={place.address} "
            f"({cause}): check that every rank was started, that the port is free, and that the hosts reach each other"
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
