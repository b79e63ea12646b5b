"""The loopback interface, which is all the network that ranks of one host need."""

from __future__ import annotations

import os
import socket


def use_loopback() -> None:
    """Let gloo use the loopback interface, unless the user chose another."""
    if (loopback := find_loopback()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def find_loopback() -> str | None:
    """Name of the loopback interface, None if it has an uncommon one."""
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)
