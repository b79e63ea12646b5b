"""Distinguish hub ids from paths, and use only cached files if the hub cannot be reached.

Download libraries retry an unreachable hub for half a minute per file. So one short request is made first; if it fails,
the libraries run in offline mode.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
FILE_ENDINGS = {
    *(".arrow", ".csv", ".feather", ".gguf", ".gz", ".jinja", ".json", ".jsonl", ".parquet", ".py", ".safetensors"),
    *(".tsv", ".txt", ".xml", ".yaml", ".yml", ".zip", ".zst"),
}
"""File suffixes; a name that ends in one is never a hub id."""
PROBE_TIMEOUT_S = 5.0
PROBE_INTERVAL_S = 60.0


def is_path_like(name: str) -> bool:
    """Whether a name can only be a path, existing or not.

    `owner/name` is ambiguous: it is a path if the current directory has a folder `owner`.
    """
    if name.startswith((".", "/", "~")) or not HUB_ID.fullmatch(name):
        return True
    owner, slash, _ = name.partition("/")
    return Path(name).suffix.lower() in FILE_ENDINGS or (bool(slash) and Path(owner).is_dir())


def is_offline() -> bool:
    """Whether requests to the hub are disabled (HF_HUB_OFFLINE)."""
    return bool(huggingface_hub.constants.HF_HUB_OFFLINE)


def find_connection_error() -> str | None:
    """Why the hub cannot be reached, None if it can; makes at most one request per `PROBE_INTERVAL_S`."""
    return probe(int(time.monotonic() // PROBE_INTERVAL_S))


@functools.lru_cache(maxsize=1)
def probe(period: int) -> str | None:
    """Send a request to the hub; the result is cached per `period`, a count of intervals."""
    del period
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=PROBE_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - huggingface_hub versions use different HTTP clients
        return " ".join(str(error).split()) or type(error).__name__
    return None


@contextmanager
def offline_if_unreachable(name: str) -> Iterator[None]:
    """Context in which libraries only use cached files if the hub is unreachable; existing paths make no request."""
    if is_offline() or Path(name).expanduser().exists() or find_connection_error() is None:
        yield
        return
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # normally set at import from the environment variable
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = False


def describe_hub_failure() -> str:
    """Why a lookup on the hub failed, and what to do."""
    if is_offline():
        return "it was not found in the cache of the hub (HF_HUB_OFFLINE is set, so nothing is downloaded)"
    error = find_connection_error()
    if error is None:
        return "the hub did not provide it (unknown or gated)"
    return (
        f"the hub {huggingface_hub.constants.ENDPOINT} cannot be reached ({error}); check the network or HF_ENDPOINT, "
        "or set HF_HUB_OFFLINE=1 to use only what was downloaded before"
    )
