"""What a model path names: a folder, a hub id, a `.gguf` file, an adapter on one of these, or an export of a model.

Nothing is read here but an adapter's config. A path that is not there is an error at once, not in a download.
"""

from __future__ import annotations

import importlib.util
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.errors import ModelError
from tunesmith.hub import describe_hub_failure, is_path_like
from tunesmith.model.source.adapter_files import ADAPTER_CONFIG, AdapterFiles, find_adapter

EXPORTED = ("hf", "adapter")
"""Folders of an export that hold a model, the one that is taken first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model's files are, in the terms of `from_pretrained`."""

    name_or_path: str
    gguf_file: str | None = None
    adapter: AdapterFiles | None = None
    """The adapter on that model, when the path named one."""

    @property
    def kwargs(self) -> dict[str, Any]:
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find_model(path: str, base_path: str | None = None) -> ModelSource:
    """Tell folder, `.gguf` file, hub id and adapter apart; what is not there is an error here, not in a download."""
    path = find_exported(path)
    adapter = find_adapter(path, base_path)
    if adapter is not None:
        try:
            base = find_model(adapter.base)
        except ModelError as error:
            raise ModelError(
                f"the base of the adapter {path!r}: {error}; set model.base_path to where it is"
            ) from error
        if base.adapter is not None:
            raise ModelError(
                f"the base of the adapter {path!r} is itself an adapter: export it as a merged model first"
            )
        return replace(base, adapter=adapter)
    place = Path(path).expanduser()
    if place.suffix == ".gguf":
        if not place.is_file():
            raise ModelError(f"model.path={path!r}: there is no such .gguf file")
        check_gguf_reader()
        return ModelSource(name_or_path=str(place.parent), gguf_file=place.name)
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise ModelError(
                f"model.path={path!r} is a folder without config.json; give a Hugging Face model folder, "
                "such as global_step_N of a run or model of a fine-tuning, or a .gguf file"
            )
        return ModelSource(name_or_path=str(place))
    if place.exists():
        raise ModelError(f"model.path={path!r} is a file, but not a .gguf file; give the folder that holds config.json")
    if is_path_like(path):
        raise ModelError(f"model.path={path!r}: there is no such folder")
    return ModelSource(name_or_path=path)


def find_exported(path: str) -> str:
    """The model in a folder that an export wrote, its `hf/` or else `adapter/`; any other path as it is."""
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return path
    for name, config in zip(EXPORTED, ("config.json", ADAPTER_CONFIG), strict=True):
        if (folder / name / config).is_file():
            return str(folder / name)
    files = sorted((folder / "gguf").glob("*.gguf"))
    if files:
        raise ModelError(
            f"model.path={path!r} is an export of GGUF files alone: name one of them, as {str(files[0])!r}, or export "
            "the format hf too"
        )
    return path


def check_gguf_reader() -> None:
    """Refuse GGUF files where the package that reads them is absent."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading a .gguf file needs the package gguf: pip install 'tunesmith[gguf]'")


def explain_failure(path: str, source: ModelSource, error: Exception) -> ModelError:
    """One sentence for what transformers said in many."""
    named, found = f"model.path={path!r}", path
    if source.adapter is not None:
        named, found = f"model.path={path!r}: its base {source.adapter.base!r}", source.adapter.base
    if not Path(found).expanduser().exists():
        return ModelError(
            f"{named} is no folder here, and {describe_hub_failure()}; give a local folder or download the model first"
            + ("" if source.adapter is None else ", and name it in model.base_path")
        )
    if isinstance(error, pickle.UnpicklingError):
        return ModelError(
            f"{named}: its weights are a pickle that holds more than tensors, which could run any code, so it is not "
            "loaded; take the model in safetensors"
        )
    reason = " ".join(str(error).split())
    return ModelError(f"{named} cannot be loaded: {reason[:300]}")
