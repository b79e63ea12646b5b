"""What a model path names: a folder, a hub id, a `.gguf` file, or an adapter on one of these.

Nothing is read here but an adapter's config. A path that is not there is an error at once, not in a download.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.errors import ModelError
from tunesmith.model.adapter import AdapterFiles, find_adapter

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


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
    if not HUB_ID.fullmatch(path):
        raise ModelError(f"model.path={path!r}: there is no such folder")
    return ModelSource(name_or_path=path)


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
            f"{named} is no folder here, and the hub did not give it "
            "(offline, unknown or gated); give a local folder or download the model first"
            + ("" if source.adapter is None else ", and name it in model.base_path")
        )
    reason = " ".join(str(error).split())
    return ModelError(f"{named} cannot be loaded: {reason[:300]}")
