"""Files of single steps, and files of many steps that replace them.

A step writes `step_000012.<suffix>`. Once a checkpoint has committed a whole range of steps, their files are merged
into `steps_000001-000100.<suffix>`: it is written whole, then the single files are removed, so a kill on the way leaves
both and loses nothing. Readers look for the single file first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import StorageError
from tunesmith.storage import TEMPORARY, load_json, load_json_lines, open_atomic, storage_errors

SINGLE = re.compile(r"step_(\d+)\.(\w+)")
MERGED = re.compile(r"steps_(\d+)-(\d+)\.(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFormat:
    """How files of one kind are named and merged."""

    single: str
    """Suffix of a step's file."""
    merged: str
    """Suffix of a file of many steps."""
    merge: Callable[[Path, Mapping[int, Path]], None]
    """Write a merged file of single files by step."""
    cut: Callable[[Path, Path, int], None]
    """Write a second merged file with the steps of a first up to a last one: `cut(source, target, last)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedFile:
    """A file that holds the steps from `first` to `last`."""

    path: Path
    first: int
    last: int


class StepFiles:
    """The files of one kind in their folder."""

    def __init__(self, folder: Path, form: StepFormat) -> None:
        self.folder = folder
        self._form = form

    def find_single(self) -> dict[int, Path]:
        """Files of one step each, by step."""
        return {
            int(match[1]): path
            for path in sorted(self.folder.glob(f"step_*.{self._form.single}"))
            if (match := SINGLE.fullmatch(path.name))
        }

    def find_merged(self) -> list[MergedFile]:
        return list(iter_merged(self.folder, self._form.merged))

    def merge(self, *, committed_step: int, steps_per_file: int) -> None:
        """Merge each whole range of `steps_per_file` steps that ends at `committed_step` or before."""
        single = self.find_single()
        for merged in self.find_merged():  # of merges that a kill ended between writing and removing
            for step in [step for step in single if merged.first <= step <= merged.last]:
                self._remove(single.pop(step))
        ranges: dict[int, dict[int, Path]] = {}
        for step, path in single.items():
            if step > 0:
                ranges.setdefault(-(-step // steps_per_file) * steps_per_file, {})[step] = path
        for last, of_range in sorted(ranges.items()):
            if last <= committed_step and len(of_range) > 1:
                name = f"steps_{min(of_range):06d}-{last:06d}.{self._form.merged}"
                self._form.merge(self.folder / name, of_range)
                for path in of_range.values():
                    self._remove(path)

    def split_merged(self, step: int) -> None:
        """Where a merged file goes beyond `step`, write a second one that ends there."""
        for merged in self.find_merged():
            if merged.first <= step < merged.last:
                target = self.folder / f"steps_{merged.first:06d}-{step:06d}.{self._form.merged}"
                self._form.cut(merged.path, target, step)

    def find_after(self, step: int) -> Iterator[Path]:
        """Files that hold steps after `step`."""
        yield from (path for number, path in self.find_single().items() if number > step)
        yield from (merged.path for merged in self.find_merged() if merged.last > step)

    def remove_single_after(self, step: int) -> None:
        """Remove the files of single steps after `step`, and what killed writes left."""
        for path in [each for number, each in self.find_single().items() if number > step]:
            self._remove(path)
        for path in self.folder.glob("step*.tmp-*"):
            if TEMPORARY.search(path.name):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        with storage_errors(path, "remove"):
            path.unlink()


def iter_merged(folder: Path, suffix: str) -> Iterator[MergedFile]:
    """Merged files, the one that ends first at the front."""
    for path in sorted(folder.glob(f"steps_*.{suffix}")):
        match = MERGED.fullmatch(path.name)
        if match is not None:
            yield MergedFile(path=path, first=int(match[1]), last=int(match[2]))


def locate_step(path: Path, suffix: str) -> tuple[Path, int | None]:
    """The file that holds the step of `path`: itself, or a merged one and the step to read of it."""
    match = SINGLE.fullmatch(path.name)
    if match is not None and not path.exists():
        step = int(match[1])
        for merged in iter_merged(path.parent, suffix):
            if merged.first <= step <= merged.last:
                return merged.path, step
    return path, None


def load_step_json(path: Path) -> Any:
    """The value that was saved as `path`, also when it has been merged into a file of JSON lines."""
    place, step = locate_step(path, "jsonl")
    if step is None:
        return load_json(place)
    for line in load_json_lines(place):
        if line["step"] == step:
            return {key: value for key, value in line.items() if key != "step"}
    raise StorageError(f"cannot read {path}: {place} does not hold that step")


def merge_json(target: Path, single: Mapping[int, Path]) -> None:
    """One line a step, which has its number under `step`."""
    with open_atomic(target) as file:
        for step, path in sorted(single.items()):
            file.write((json.dumps({"step": step} | load_json(path), ensure_ascii=False) + "\n").encode())


def cut_json(source: Path, target: Path, last: int) -> None:
    with open_atomic(target) as file:
        for line in load_json_lines(source):
            if line["step"] <= last:
                file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())


JSON_STEPS = StepFormat(single="json", merged="jsonl", merge=merge_json, cut=cut_json)
