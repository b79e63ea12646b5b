"""What is exported: the model that a path means, the run that made it, and what it is called.

A path may be a model folder, an adapter folder, a hub id, or the folder of a run or stage, which means the model that
it left: `model/`, its last checkpoint, or what an export wrote. A checkpoint that is not whole is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config import ExportSection
from tunesmith.errors import ModelError
from tunesmith.model.checkpoint import DONE, check_complete, find_last_checkpoint
from tunesmith.model.source.adapter_files import ADAPTER_CONFIG, AdapterFiles, find_adapter
from tunesmith.model.source.resolve import find_exported
from tunesmith.storage import CHECKPOINT, TEMPORARY, RunPaths

STAGE_MODEL = "model"
"""The folder in which a fine-tuning leaves its result."""
PLAIN_NAMES = re.compile(r"model|merged|hf|global_step_\d+")
"""Names of folders that say nothing about the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """The model to export."""

    path: str
    """Folder of the model or adapter, or a hub id."""
    adapter: AdapterFiles | None
    run: RunPaths | None
    """The run or stage that made it, where it is known."""
    name: str

    @property
    def base(self) -> str:
        """Where the weights under an adapter are; the model itself without one."""
        return self.path if self.adapter is None else self.adapter.base

    def describe(self) -> dict[str, Any]:
        """What tells one source from another later on: its place, and its files as they are now."""
        folder = Path(self.path)
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
        return {"path": self.path, "base": self.base, "files": stats}


def find_source(settings: ExportSection) -> ExportSource:
    """Raise ModelError or StorageError when there is no whole model to export."""
    folder = Path(settings.path).expanduser()
    if folder.suffix == ".gguf":
        raise ModelError(
            f"path={settings.path!r} is a GGUF file already, and does not say all that other formats need; "
            "export the model folder that it was made from"
        )
    if folder.is_dir():
        folder = find_model_folder(folder.absolute())
    path = str(folder) if folder.is_dir() else settings.path
    run = find_run(folder)
    return ExportSource(
        path=path,
        adapter=find_adapter(path, settings.base_path),
        run=run,
        name=settings.name or choose_name(folder, run),
    )


def find_model_folder(folder: Path) -> Path:
    """The folder itself when it holds a model, else the model that a run or stage left in it."""
    if TEMPORARY.search(folder.name):
        raise ModelError(f"path={str(folder)!r} is what a killed write left; export a whole checkpoint")
    folder = Path(find_exported(str(folder)))
    if not is_model(folder):
        left = folder / STAGE_MODEL
        found = left if is_model(left) and (left / DONE).is_file() else find_last_checkpoint(folder)
        if found is None:
            raise ModelError(
                f"path={str(folder)!r} holds no model: give a folder with config.json or {ADAPTER_CONFIG}, "
                "or that of a run with a finished checkpoint"
            )
        folder = found
    if CHECKPOINT.fullmatch(folder.name) or (folder / DONE).is_file():
        check_complete(folder)
    return folder


def is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file()


def find_run(folder: Path) -> RunPaths | None:
    """The run that a checkpoint or a stage's model belongs to."""
    is_inside = CHECKPOINT.fullmatch(folder.name) is not None or folder.name == STAGE_MODEL
    run = RunPaths(folder.parent)
    return run if is_inside and run.config.is_file() else None


def choose_name(folder: Path, run: RunPaths | None) -> str:
    """The last part of the path that says something, made fit for a file's name."""
    places = [run.root] if run is not None else [folder, *folder.parents]
    said = next((place.name for place in places if place.name and not PLAIN_NAMES.fullmatch(place.name)), "model")
    return re.sub(r"[^\w.+-]+", "-", said, flags=re.ASCII).lstrip("._+-") or "model"
