"""A fingerprint of a model's weights, which distinguishes models of the same architecture.

It hashes the names, dtypes and shapes of all tensors (`layout`) and the first row of each (`rows`), so it takes
milliseconds. Models with the same layout are taken to be the same if their rows are; models with different layouts
cannot be compared.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from tunesmith.errors import ModelError
from tunesmith.model.source.resolve import ADAPTER_WEIGHTS, find_exported
from tunesmith.storage import compute_checksum


def compute_fingerprint(path: str) -> dict[str, str] | None:
    """Digests `layout` and `rows` of a folder or of a cached hub model; None without safetensors files."""
    folder = find_folder(path)
    files = [] if folder is None else sorted(folder.glob("model*.safetensors"))
    if not files:
        return None
    layout, rows = hashlib.sha256(), hashlib.sha256()
    entries: dict[str, tuple[str, bytes]] = {}
    for file in files:
        try:
            weights = safe_open(file, framework="pt")
        except SafetensorError as error:
            raise ModelError(f"the weights in {str(file)!r} cannot be read: {error}") from error
        with weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                part = weights.get_slice(name)
                shape = part.get_shape()
                row = part[:1] if shape else weights.get_tensor(name)
                entries[name] = (f"{part.get_dtype()} {shape}", row.contiguous().flatten().view(torch.uint8).numpy())
    for name, (kind, row_bytes) in sorted(entries.items()):
        layout.update(f"{name} {kind}\n".encode())
        rows.update(row_bytes)
    return {"layout": layout.hexdigest(), "rows": rows.hexdigest()}


def describe_weights(path: str) -> dict[str, str] | str | None:
    """The fingerprint of a model's weights, or the checksum of an adapter's."""
    adapter = Path(path).expanduser() / ADAPTER_WEIGHTS
    return compute_checksum(adapter) if adapter.is_file() else compute_fingerprint(path)


def find_folder(path: str) -> Path | None:
    """The local folder of a model's files: the path itself, or the hub cache; None if there is none."""
    place = Path(find_exported(path)).expanduser()
    if place.is_dir():
        return place
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None
