"""Names that may be on the hub: which are paths and never looked up there, and whether the hub can be reached at all.

The libraries that download retry an unreachable hub for half a minute for each file. So one short request comes first,
and without an answer only what was downloaded before is used.
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
"""Endings of files; no name on the hub is taken to end in one."""
PROBE_TIMEOUT_S = 5.0
PROBE_INTERVAL_S = 60.0


def is_path_like(name: str) -> bool:
    """Whether a name is a path and nothing else, whether or not something is there.

    `owner/name` may be both: it is a path where a folder `owner` is in the current one.
    """
    if name.startswith((".", "/", "~")) or not HUB_ID.fullmatch(name):
        return True
    owner, slash, _ = name.partition("/")
    return Path(name).suffix.lower() in FILE_ENDINGS or (bool(slash) and Path(owner).is_dir())


def is_offline() -> bool:
    """Whether the hub is not to be asked (HF_HUB_OFFLINE)."""
    return bool(huggingface_hub.constants.HF_HUB_OFFLINE)


def find_fault() -> str | None:
    """Why the hub cannot be reached, None when it answers; it is asked at most once in `PROBE_INTERVAL_S`."""
    return probe(int(time.monotonic() // PROBE_INTERVAL_S))


@functools.lru_cache(maxsize=1)
def probe(period: int) -> str | None:
    """Ask the hub; `period` tells one interval from the next."""
    del period
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=PROBE_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - the HTTP client of the hub's library differs between its versions
        return " ".join(str(error).split()) or type(error).__name__
    return None


@contextmanager
def reachable_or_offline(name: str) -> Iterator[None]:
    """Within it, libraries take a name from the cache at once where the hub would not answer; paths need no hub."""
    if is_offline() or Path(name).expanduser().exists() or find_fault() is None:
        yield
        return
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # what the environment variable of this name sets at import
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = False


def describe_miss() -> str:
    """Why the hub did not give what was asked for, and what to do."""
    if is_offline():
        return "the hub did not give it (offline, unknown or gated; HF_HUB_OFFLINE is set, so nothing is downloaded)"
    fault = find_fault()
    if fault is None:
        return "the hub did not give it (offline, unknown or gated)"
    return (
        f"the hub {huggingface_hub.constants.ENDPOINT} cannot be reached ({fault}); check the network or HF_ENDPOINT, "
        "or set HF_HUB_OFFLINE=1 to use only what was downloaded before"
    )
