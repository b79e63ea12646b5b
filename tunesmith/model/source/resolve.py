"""Resolve a model path: a folder, a hub id, a `.gguf` file, an adapter on one of these, or the folder of an export.

Of an adapter only its config is read: a folder is an adapter if it holds PEFT's `adapter_config.json` and no full-model
weights. A local path that does not exist is an error here, not a failed download later. Torch is not imported, so that
paths are checked before it is.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.errors import ModelError
from tunesmith.hub import describe_hub_failure, is_path_like

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
    target_modules: list[str]
    """Names of adapted layers, or one pattern."""
    target_parameters: list[str]
    """Names of adapted weights of experts."""
    changes_base: bool
    """Whether the base without the adapter is another one: its biases are trained, or its weights were split."""


def find_adapter(path: str, base_path: str | None) -> AdapterFiles | None:
    """The adapter at a path, or None if it names a full model."""
    folder = Path(path).expanduser()
    if not (folder / ADAPTER_CONFIG).is_file() or any(folder.glob("model*.safetensors")):
        if base_path is not None:
            raise ModelError(f"model.base_path={base_path!r} is unused: model.path={path!r} is not an adapter folder")
        return None
    try:
        settings = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind, base = settings["peft_type"], base_path or settings["base_model_name_or_path"]
        modules = settings["target_modules"]
        adapter = AdapterFiles(
            folder=folder,
            base=base or "",
            r=settings["r"],
            alpha=settings["lora_alpha"],
            target_modules=[modules] if isinstance(modules, str) else modules or [],
            target_parameters=settings.get("target_parameters") or [],
            changes_base=settings.get("bias", "none") != "none"
            or settings.get("init_lora_weights") not in (None, True, False, "gaussian", "orthogonal", "eva"),
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


EXPORTED = ("hf", "adapter")
"""Folders of an export that hold a model, in order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model's files are, as arguments of `from_pretrained`."""

    name_or_path: str
    gguf_file: str | None = None
    adapter: AdapterFiles | None = None
    """The adapter on that model, if the path names one."""

    @property
    def kwargs(self) -> dict[str, Any]:
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def find_model(path: str, base_path: str | None = None) -> ModelSource:
    """Resolve a path to a folder, `.gguf` file, hub id or adapter; a local path that does not exist is an error."""
    if not path:  # Path("") is the working folder
        raise ModelError("model.path is empty: give a model folder, a .gguf file or a hub id")
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
    """The model in a folder written by an export, its `hf/` or else `adapter/`; any other path unchanged."""
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return path
    for name, config in zip(EXPORTED, ("config.json", ADAPTER_CONFIG), strict=True):
        if (folder / name / config).is_file():
            return str(folder / name)
    files = sorted((folder / "gguf").glob("*.gguf"))
    if files:
        raise ModelError(
            f"model.path={path!r} is an export with GGUF files only: name one of them, such as {str(files[0])!r}, or "
            "export the format hf too"
        )
    return path


def check_gguf_reader() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("reading a .gguf file needs the package gguf: pip install 'tunesmith[gguf]'")


def explain_load_error(path: str, source: ModelSource, error: Exception) -> ModelError:
    """A one-sentence error in place of transformers' message."""
    named, found = f"model.path={path!r}", path
    if source.adapter is not None:
        named, found = f"model.path={path!r}: its base {source.adapter.base!r}", source.adapter.base
    if not Path(found).expanduser().exists():
        return ModelError(
            f"{named} is not a local folder, and {describe_hub_failure()}; give a local folder or download the model "
            "first" + ("" if source.adapter is None else ", and name it in model.base_path")
        )
    if isinstance(error, pickle.UnpicklingError):
        return ModelError(
            f"{named}: its weights are a pickle with more than tensors, which could run any code, so it is not "
            "loaded; use the model in safetensors format"
        )
    if "tokenizer" in str(error) and not any(Path(found).expanduser().glob("tokenizer*")):
        return ModelError(f"{named} has no tokenizer: copy the model's tokenizer.json and tokenizer_config.json there")
    reason = " ".join(str(error).split())
    return ModelError(f"{named} cannot be loaded: {reason[:300]}")
