"""Sessions of environments and of tools in this process, counted, so that one that is never closed shows.

A session counts as open until its `close` has returned.
"""

from __future__ import annotations

from collections import Counter

SESSIONS: Counter[str] = Counter()
"""How many were `opened`, and how many `closed`."""


def count_open_sessions() -> int:
    return SESSIONS["opened"] - SESSIONS["closed"]


def compute_session_stats() -> dict[str, float]:
    """The figure of a step, in a process that has opened a session."""
    return {"rollout/open_sessions": float(count_open_sessions())} if SESSIONS else {}
