"""Counters that ranks increase one after the other, through a store of the first rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from tunesmith.cluster.ranks import Ranks, rank_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCounters:
    """Counters by name, each from 0."""

    store: Any
    """Of torch's type TCPStore."""

    def take(self, name: str) -> int:
        """The counter's value, which no other call gets; it is increased by one."""
        with rank_errors():
            return int(self.store.add(name, 1)) - 1


def open_counters(ranks: Ranks, *, timeout_s: float) -> SharedCounters | None:
    """The counters of all ranks, which all call this; None for a single one."""
    if ranks.is_alone:
        return None
    host, timeout = os.environ.get("MASTER_ADDR", "127.0.0.1"), timedelta(seconds=timeout_s)
    build = partial(dist.TCPStore, host, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
    with rank_errors():
        store = build(port=0, is_master=True) if ranks.is_first else None
        port: int = ranks.broadcast_object(None if store is None else store.port)
        if store is None:
            store = build(port=port, is_master=False)
    return SharedCounters(store=store)
