"""Files of single steps, and merged files that replace them.

A step writes `step_000012.<suffix>`. Once a checkpoint has committed a whole range of steps, their files are merged
into `steps_000001-000100.<suffix>`: the merged file is written completely before the single files are removed, so a
kill in between leaves both and loses nothing. Readers look for the single file first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import StorageError
from tunesmith.storage import TEMPORARY, encode_json_line, load_json, load_json_lines, open_atomic, storage_errors

SINGLE = re.compile(r"step_(\d+)\.(\w+)")
MERGED = re.compile(r"steps_(\d+)-(\d+)\.(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFormat:
    """Suffixes of one kind of step file, and the functions that merge and truncate them."""

    single: str
    """Suffix of a step's file."""
    merged: str
    """Suffix of a merged file."""
    merge: Callable[[Path, Mapping[int, Path]], None]
    """`merge(target, single_files)` writes a merged file from single files, keyed by step."""
    truncate: Callable[[Path, Path, int], None]
    """`truncate(source, target, last)` writes the steps of a merged file up to `last` to a second one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedFile:
    """A file that holds the steps from `first` to `last`."""

    path: Path
    first: int
    last: int


class StepFiles:
    """The step files of one kind in a folder."""

    def __init__(self, folder: Path, step_format: StepFormat) -> None:
        self.folder = folder
        self._format = step_format

    def find_single(self) -> dict[int, Path]:
        """Single-step files, keyed by step."""
        return {
            int(match[1]): path
            for path in sorted(self.folder.glob(f"step_*.{self._format.single}"))
            if (match := SINGLE.fullmatch(path.name))
        }

    def find_merged(self) -> list[MergedFile]:
        return list(iter_merged(self.folder, self._format.merged))

    def list_steps(self) -> list[int]:
        """Steps that have files, in ascending order."""
        merged = (range(each.first, each.last + 1) for each in self.find_merged())
        return sorted(set(self.find_single()).union(*merged))

    def merge(self, *, committed_step: int, steps_per_file: int) -> None:
        """Merge each complete range of `steps_per_file` steps that ends at or before `committed_step`."""
        single = self.find_single()
        for merged in self.find_merged():  # left by a merge that was killed before it removed the single files
            for step in [step for step in single if merged.first <= step <= merged.last]:
                self._remove(single.pop(step))
        ranges: dict[int, dict[int, Path]] = {}
        for step, path in single.items():
            if step > 0:
                ranges.setdefault(-(-step // steps_per_file) * steps_per_file, {})[step] = path
        for last, paths in sorted(ranges.items()):
            if last <= committed_step and len(paths) > 1:
                name = f"steps_{min(paths):06d}-{last:06d}.{self._format.merged}"
                self._format.merge(self.folder / name, paths)
                for path in paths.values():
                    self._remove(path)

    def split_merged(self, step: int) -> None:
        """For a merged file that extends past `step`, write a second one that ends at `step`."""
        for merged in self.find_merged():
            if merged.first <= step < merged.last:
                target = self.folder / f"steps_{merged.first:06d}-{step:06d}.{self._format.merged}"
                self._format.truncate(merged.path, target, step)

    def find_after(self, step: int) -> Iterator[Path]:
        """Files that hold steps after `step`."""
        yield from (path for number, path in self.find_single().items() if number > step)
        yield from (merged.path for merged in self.find_merged() if merged.last > step)

    def remove_single_after(self, step: int) -> None:
        """Remove single-step files after `step` and temporary files left by interrupted writes."""
        for path in [each for number, each in self.find_single().items() if number > step]:
            self._remove(path)
        for path in self.folder.glob("step*.tmp-*"):
            if TEMPORARY.search(path.name):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        with storage_errors(path, "remove"):
            path.unlink()


def iter_merged(folder: Path, suffix: str) -> Iterator[MergedFile]:
    """Merged files in ascending order of their steps."""
    for path in sorted(folder.glob(f"steps_*.{suffix}")):
        match = MERGED.fullmatch(path.name)
        if match is not None:
            yield MergedFile(path=path, first=int(match[1]), last=int(match[2]))


def locate_step(path: Path, suffix: str) -> tuple[Path, int | None]:
    """The file that holds the step of `path`: `path` itself and None, or a merged file and the step to read from it."""
    match = SINGLE.fullmatch(path.name)
    if match is not None and not path.exists():
        step = int(match[1])
        for merged in iter_merged(path.parent, suffix):
            if merged.first <= step <= merged.last:
                return merged.path, step
    return path, None


def load_step_json(path: Path) -> Any:
    """The value that was saved as `path`, also after it has been merged into a JSON lines file."""
    stored_path, step = locate_step(path, "jsonl")
    if step is None:
        return load_json(stored_path)
    for line in load_json_lines(stored_path):
        if line["step"] == step:
            return {key: value for key, value in line.items() if key != "step"}
    raise StorageError(f"cannot read {path}: {stored_path} does not hold this step")


def merge_json(target: Path, single: Mapping[int, Path]) -> None:
    """Write one JSON line per step, with the step number under `step`."""
    with open_atomic(target) as file:
        for step, path in sorted(single.items()):
            file.write(encode_json_line({"step": step} | load_json(path)))


def truncate_json(source: Path, target: Path, last: int) -> None:
    with open_atomic(target) as file:
        for line in load_json_lines(source):
            if line["step"] <= last:
                file.write(encode_json_line(line))


JSON_STEPS = StepFormat(single="json", merged="jsonl", merge=merge_json, truncate=truncate_json)
