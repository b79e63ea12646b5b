"""TCP ports of this host for servers that a test starts later.

A port that the system assigned and that was closed again may be assigned to another process before the server binds it.
The ports here lie below the range from which the system assigns, and a UDP socket on the same number, which stays open
until the process ends, keeps the tests of other processes from choosing the same one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

FIRST, END = 20_000, 32_000
"""Below the range of assigned ports of Linux (32768 to 60999) and of macOS and Windows (49152 to 65535)."""
ASSIGNED = Path("/proc/sys/net/ipv4/ip_local_port_range")

_reserved: list[socket.socket] = []


def find_free_port(number: int = 1) -> int:
    """The first of `number` adjacent ports that no test of any process receives again until this process ends."""
    end = min(END, int(ASSIGNED.read_text().split()[0])) if ASSIGNED.exists() else END
    if end - FIRST < 1000:  # the system was told to assign these too: there is no better range
        end = END
    start = FIRST + os.getpid() * 7 % (end - FIRST)
    for port in (*range(start, end - number), *range(FIRST, start)):
        reserved = [_reserve(each) for each in range(port, port + number)]
        if all(reserved):
            _reserved.extend(each for each in reserved if each is not None)
            return port
        for each in reserved:
            if each is not None:
                each.close()
    raise AssertionError("no free port")


def _reserve(port: int) -> socket.socket | None:
    """A UDP socket on the port, if no one else has it and a server could listen on it."""
    reserved = socket.socket(type=socket.SOCK_DGRAM)
    try:
        reserved.bind(("127.0.0.1", port))
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("0.0.0.0", port))
    except OSError:
        reserved.close()
        return None
    return reserved
