"""Resolve the path of an export: the model, the run that trained it, and the model's name.

A path is a model folder, an adapter folder, a hub id, or the folder of a run or stage, which resolves to its result:
`model/`, its last checkpoint, or an exported model. An incomplete checkpoint is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config import ExportSection
from tunesmith.errors import ModelError
from tunesmith.hub import is_path_like
from tunesmith.model.source.resolve import ADAPTER_CONFIG, AdapterFiles, find_adapter, find_exported
from tunesmith.runs.record import RunRecord, find_run_folder
from tunesmith.storage import CHECKPOINT, DONE, TEMPORARY, RunPaths, check_complete

GENERIC_NAMES = re.compile(r"model|merged|hf|global_step_\d+")
"""Folder names that do not identify a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """The model to export."""

    path: str
    """Folder of the model or adapter, or a hub id."""
    adapter: AdapterFiles | None
    run: RunRecord | None
    """The run or stage that trained it; None if unknown."""
    name: str

    @property
    def base(self) -> str:
        """Path of the base weights; the model itself if there is no adapter."""
        return self.path if self.adapter is None else self.adapter.base

    def describe(self) -> dict[str, Any]:
        """Fingerprint of the source: its paths, and sizes and modification times of its weight files."""
        folder = Path(self.path)
        files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
        stats = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
        return {"path": self.path, "base": self.base, "files": stats}


def find_source(settings: ExportSection) -> ExportSource:
    """Raise ModelError or StorageError if there is no complete model to export."""
    folder = Path(settings.path).expanduser()
    if folder.suffix == ".gguf":
        raise ModelError(
            f"path={settings.path!r} is a GGUF file, which lacks data that other formats need; "
            "export the model folder that it was converted from, or make one with tunesmith model convert"
        )
    if folder.is_dir():
        folder = find_model_folder(folder.resolve() if folder.is_symlink() else folder.absolute())
    elif not folder.exists() and is_path_like(settings.path):
        raise ModelError(f"path={settings.path!r}: there is no such folder")
    path = str(folder) if folder.is_dir() else settings.path
    root = find_run_folder(folder)  # of a checkpoint or of a stage's model
    run = RunRecord(root) if root != folder and RunPaths(root).config.is_file() else None
    return ExportSource(
        path=path,
        adapter=find_adapter(path, settings.base_path),
        run=run,
        name=settings.name or choose_name(folder, run),
    )


def find_model_folder(folder: Path) -> Path:
    """The folder itself if it holds a model, else the result of the run or stage in it."""
    if TEMPORARY.search(folder.name):
        raise ModelError(f"path={str(folder)!r} is left from an interrupted write; export a complete checkpoint")
    folder = Path(find_exported(str(folder)))
    if not is_model(folder):
        run = RunRecord(folder)
        is_trained = run.trained is not None and is_model(run.trained)
        found = run.trained if is_trained else run.last_checkpoint
        if found is None:
            raise ModelError(
                f"path={str(folder)!r} holds no model: give a folder with config.json or {ADAPTER_CONFIG}, "
                "or the folder of a run with a complete checkpoint"
            )
        folder = found
    if CHECKPOINT.fullmatch(folder.name) or (folder / DONE).is_file():
        check_complete(folder)
    return folder


def is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file()


def choose_name(folder: Path, run: RunRecord | None) -> str:
    """The last path component that identifies the model, as a valid file name."""
    paths = [run.root] if run is not None else [folder, *folder.parents]
    name = next((path.name for path in paths if path.name and not GENERIC_NAMES.fullmatch(path.name)), "model")
    return re.sub(r"[^\w.+-]+", "-", name, flags=re.ASCII).lstrip("._+-") or "model"
