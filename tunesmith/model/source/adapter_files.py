"""Adapter folders on disk: how one is recognized, and which base model it names.

A folder is an adapter if it holds PEFT's `adapter_config.json` and no full-model weights. Only the standard library is
imported, so that a model path can be checked before torch is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import ModelError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_FINGERPRINT = "base_fingerprint.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """An adapter on disk."""

    folder: Path
    base: str
    """Folder, `.gguf` file or hub id of the base model."""
    r: int
    alpha: float
    target_modules: Any
    """As in PEFT's config: a pattern or a list of names."""


def is_adapter(place: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (place / ADAPTER_CONFIG).is_file() and not any(place.glob("model*.safetensors"))


def find_adapter(path: str, base_path: str | None) -> AdapterFiles | None:
    """The adapter at a model path, or None if the path names a full model."""
    folder = Path(path).expanduser()
    if not is_adapter(folder):
        if base_path is not None:
            raise ModelError(f"model.base_path={base_path!r} is unused: model.path={path!r} is not an adapter folder")
        return None
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind, base = settings["peft_type"], base_path or settings["base_model_name_or_path"]
        adapter = AdapterFiles(
            folder=folder,
            base=base or "",
            r=settings["r"],
            alpha=settings["lora_alpha"],
            target_modules=settings["target_modules"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model.path={path!r}: {ADAPTER_CONFIG} is not a LoRA adapter's config ({error!r})") from error
    if kind != "LORA":
        raise ModelError(f"model.path={path!r} is an adapter of type {kind}; LoRA adapters are supported")
    if not base:
        raise ModelError(f"model.path={path!r}: the adapter does not name its base; set model.base_path")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"model.path={path!r}: the adapter has no {ADAPTER_WEIGHTS}")
    return adapter
