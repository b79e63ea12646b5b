"""The folder that preparing leaves: written whole under a temporary name, `DONE.json` last, then renamed.

A folder with its `DONE.json` is complete. What costs (rewritten questions, pass rates) is kept beside it, in
`<name>.work`, until then, so that the same command after a kill asks no model twice.
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

BLOCK_BYTES = 2**20
TRAIN, EVALUATION, REPORT, PARAPHRASES = "train.jsonl", "eval.jsonl", "report.json", "paraphrases.jsonl"


def hash_settings(settings: PrepareSection) -> str:
    """What tells one preparation from another: everything but how fast it runs."""
    return hash_json(list_settings(settings))


def list_settings(settings: PrepareSection) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude={"num_cpu_threads": True, "paraphrase": {"max_concurrency"}})


def hash_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


def hash_sources(settings: PrepareSection) -> dict[str, str | None]:
    """SHA-256 of what is in each set's files; None for a set that is not on this disk."""
    sources = {"data": settings.data, "eval_data": settings.eval_data}
    return {knob: hash_files(Path(section.path).expanduser()) for knob, section in sources.items() if section}


def hash_files(place: Path) -> str | None:
    """Of a data set's file, or of all of them in a folder with their names."""
    if not place.exists():
        return None
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.suffix in FORMATS)
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(place)}\n{path.stat().st_size}\n".encode())
        with storage_errors(path, "read"), path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def find_report(folder: Path, settings: PrepareSection) -> dict[str, Any] | None:
    """The report of a complete folder; None where there is no folder yet.

    One of other settings or other rows, one that is damaged, and one that is not ours are errors.
    """
    if not folder.exists():
        return None
    if not (folder / DONE).is_file():
        if folder.is_dir() and not any(folder.iterdir()):
            return None
        raise StorageError(f"{folder} is unfinished or holds something else (no {DONE}): remove it, or choose another")
    done = load_json(folder / DONE)
    if done.get("settings_hash") != hash_settings(settings):
        changed = list_changed_keys(done.get("settings", {}), list_settings(settings))
        raise StorageError(
            f"{folder} was prepared with other settings ({', '.join(changed)}): remove it, or choose another folder"
        )
    for knob, digest in hash_sources(settings).items():
        if None not in (digest, done["sources"].get(knob)) and digest != done["sources"][knob]:
            raise StorageError(
                f"{folder} was prepared when {knob} held other rows: remove it, or choose another folder"
            )
    check_complete(folder)
    report: dict[str, Any] = load_json(folder / REPORT)
    return report


def list_changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys in which two settings differ."""
    changed = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changed += list_changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            changed.append(f"{prefix}{key}")
    return changed


def open_work_folder(folder: Path) -> Path:
    """Where costly answers are kept until the folder is written."""
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
    """Write all files, then make them the folder; `sources` are the hashes of what the rows were read from."""
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
