"""The output folder of `tunesmith prepare`: written under a temporary name, `DONE.json` last, then renamed.

A folder that has a `DONE.json` is complete. Until then, expensive results (rewritten questions, pass rates) are kept in
`<name>.work` next to it, so that rerunning a killed command repeats no request.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tunesmith.config import PrepareSection
from tunesmith.errors import StorageError
from tunesmith.model.checkpoint import DONE, check_complete, new_folder
from tunesmith.storage import load_json, remove_tree, save_json, save_text, storage_errors
from tunesmith.tasks.load import FORMATS

CHUNK_BYTES = 2**20
TRAIN, EVALUATION, REPORT, PARAPHRASES = "train.jsonl", "eval.jsonl", "report.json", "paraphrases.jsonl"


def hash_settings(settings: PrepareSection) -> str:
    """Hash of all settings that can change the result."""
    return hash_json(list_settings(settings))


def list_settings(settings: PrepareSection) -> dict[str, Any]:
    """All settings but those that change only the speed."""
    return settings.model_dump(mode="json", exclude={"num_cpu_threads": True, "paraphrase": {"max_concurrency"}})


def hash_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def hash_sources(settings: PrepareSection) -> dict[str, str | None]:
    """SHA-256 of the files of each data set; None for one that is not a local path."""
    sources = {"data": settings.data, "eval_data": settings.eval_data}
    return {knob: hash_files(Path(section.path).expanduser()) for knob, section in sources.items() if section}


def hash_files(path: Path) -> str | None:
    """SHA-256 of a data file, or of all data files in a folder with their names; None if `path` does not exist."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in FORMATS)
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path)}\n{file.stat().st_size}\n".encode())
        with storage_errors(file, "read"), file.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def find_report(folder: Path, settings: PrepareSection) -> dict[str, Any] | None:
    """The report of a complete folder; None if the folder is missing or empty.

    Raises StorageError for a folder with other settings or other input rows, a damaged one, and one without DONE.json.
    """
    if not folder.exists():
        return None
    if not (folder / DONE).is_file():
        if folder.is_dir() and not any(folder.iterdir()):
            return None
        raise StorageError(f"{folder} is incomplete or not a prepared folder (no {DONE}): remove it, or choose another")
    done = load_json(folder / DONE)
    if done.get("settings_hash") != hash_settings(settings):
        changed = list_changed_keys(done.get("settings", {}), list_settings(settings))
        raise StorageError(
            f"{folder} was prepared with other settings ({', '.join(changed)}): remove it, or choose another folder"
        )
    for knob, digest in hash_sources(settings).items():
        if None not in (digest, done["sources"].get(knob)) and digest != done["sources"][knob]:
            raise StorageError(f"{folder} was prepared from other rows in {knob}: remove it, or choose another folder")
    check_complete(folder)
    report: dict[str, Any] = load_json(folder / REPORT)
    return report


def list_changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ."""
    changed = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changed += list_changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(f"{prefix}{key}")
    return changed


def open_work_folder(folder: Path) -> Path:
    """Create the folder that keeps expensive results until the output folder is written."""
    work = folder.with_name(f"{folder.name}.work")
    with storage_errors(work, "write"):
        work.mkdir(parents=True, exist_ok=True)
    return work


def save_folder(
    folder: Path,
    settings: PrepareSection,
    *,
    train: Iterable[Mapping[str, Any]],
    evaluation: Iterable[Mapping[str, Any]] | None,
    report: Mapping[str, Any],
    sources: Mapping[str, str | None],
) -> None:
    """Write all files, then rename them into place; `sources` are the hashes of the input files."""
    work = folder.with_name(f"{folder.name}.work")
    done = {
        "settings_hash": hash_settings(settings),
        "settings": list_settings(settings),
        "sources": dict(sources),
    }
    with new_folder(folder, done) as temporary:
        save_text(temporary / TRAIN, format_lines(train))
        if evaluation is not None:
            save_text(temporary / EVALUATION, format_lines(evaluation))
        if (work / PARAPHRASES).is_file():
            shutil.copyfile(work / PARAPHRASES, temporary / PARAPHRASES)
        save_json(temporary / REPORT, dict(report))
    if work.exists():
        remove_tree(work)


def format_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
