"""The workspace of a command: one process writes it at a time, and the repeated command resumes what a kill left.

Two kinds of output have a workspace: a folder that fills up (`tune`, `sft`, `prefer`, `run`, `eval`, the flywheel), and
a result that appears whole, by one rename (`prepare`, `export`, `pass-rate`). Their parts are the same:

    lock      `run.lock` in the folder, or `NAME.lock` beside a result until it is there. A second process is refused;
              the operating system releases the lock of a process that ends in any way.
    inputs    What the content depends on: settings, and digests of rows and weights. They are on disk before the first
              part (of a training in `config.yaml` and `sources.json`), or in the `DONE.json` of a result. Other inputs
              are refused by a sentence that names each key.
    journal   Finished parts: lines that are appended and synced (`Journal`), or a file or folder for each part.
    commit    A file or folder is written under a temporary name and renamed (`open_atomic`, `new_folder`), so a part is
              there or is not. What a kill leaves under temporary names is removed by the next process with the lock.
    finish    The result with its `DONE.json`; then unfinished work is removed.

A worked example, a measurement of many rows into the new file `out`:

    with open_part(Path("out"), {"settings": {"seed": 0}, "rows": digest_rows(rows)}) as journal:    # out.lock
        for row in rows[len(journal.rows) :]:
            journal.append(measure(row))
        save_json(Path("out"), load_json_lines(journal.path))

Killed after row 60, it leaves `out.part` with 60 lines and `out.part.json` with the inputs. The same command measures
row 61 next; with seed 1 it ends with "out.part was made with other settings: seed was 0, is 1. Restore them, or choose
another output". A result that is a folder has its inputs in its DONE.json (`find_result`): the same command returns its
record at once, without a lock, and seed 1 is refused by the same sentence.

Which checkpoint reinforcement learning resumes from, and where files of later steps go, is decided in `run_folder`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Self

from tunesmith.config import Section
from tunesmith.errors import ConfigError, StorageError, TunesmithError
from tunesmith.monitor.tracker import flatten
from tunesmith.runs.load_config import dump_config, load_section
from tunesmith.storage import (
    DONE,
    TEMPORARY,
    Journal,
    RunPaths,
    check_complete,
    load_json,
    locked,
    locked_beside,
    remove_leftovers,
    save_json,
    save_text,
    storage_errors,
)
from tunesmith.types import Task

CONTENTS = ("sources", "questions", "rows", "weights")
"""Inputs that are digests of content. One that is None on one side, such as a file that is gone, is not compared."""
SPEED_KEYS = (
    "num_cpu_threads", "rollout.max_concurrency", "trainer.max_tokens_per_row", "trainer.logprob_chunk_tokens",
    "trainer.has_gradient_checkpointing", "trainer.has_compiled_layers", "trainer.has_row_graphs",
    "trainer.has_prefix_sharing", "engine.page_size", "engine.max_num_seqs", "engine.max_batched_tokens",
    "engine.kv_cache_tokens", "engine.kv_cache_gib", "engine.max_waiting", "engine.has_prefix_cache",
    "engine.has_packed_weights", "engine.cuda_decode", "engine.decode_block", "engine.max_speculating_seqs",
    "engine.tensor_parallel_size", "engine.vllm.python", "engine.vllm.devices", "engine.vllm.gpu_memory_share",
    "engine.vllm.weight_transfer", "engine.vllm.start_timeout_s", "engine.vllm.has_eager",
)  # fmt: skip
"""Keys of memory and speed, which may change when a training is resumed: errors of memory advise it. Another order of
sums may change the last bits of what follows, but not the distribution that is sampled or the loss that is trained."""
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class Workspace:
    """The output of one command, locked between `lock` and `close`."""

    def __init__(self, root: Path, *, is_whole: bool = False) -> None:
        """`is_whole`: the output appears by one rename; otherwise it is a folder that fills up."""
        self.root = root
        self.paths = RunPaths(root)
        self._is_whole = is_whole
        self._held = ExitStack()

    def lock(self) -> Self:
        """Lock the output, and make the folder that the lock is in; StorageError if another process holds the lock."""
        self._held.enter_context(locked_beside(self.root) if self._is_whole else locked(self.paths.lock, self.root))
        return self

    def close(self) -> None:
        """Release the lock."""
        self._held.close()

    def __enter__(self) -> Self:
        return self.lock()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def find_result(self, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The DONE.json of a whole result that was made from these inputs; None if there is no result yet.

        Raises:
            ConfigError: the result was made from other inputs.
            StorageError: the result is damaged, or other files are in its place.
        """
        if not (self.root / DONE).is_file():
            self.check_unused()
            return None
        record: dict[str, Any] = load_json(self.root / DONE)
        check_same(self.root, record, inputs)
        check_complete(self.root)
        return record

    def list_files(self) -> list[str]:
        """Names in the folder, or that of a file in its place, less the lock and what killed writes left."""
        found = self.root.iterdir() if self.root.is_dir() else filter(Path.exists, [self.root])
        return sorted(path.name for path in found if path != self.paths.lock and not TEMPORARY.search(path.name))

    def check_unused(self) -> None:
        """Raise StorageError if there are files."""
        if names := ", ".join(self.list_files()[:3]):
            raise StorageError(f"{self.root} already holds other files ({names}): choose another folder, or remove it")

    def check_config(
        self, config: Section, *, mutable_keys: Sequence[str], sources: Mapping[str, str | None] | None = None
    ) -> None:
        """`check_same` for the settings in config.yaml and the digests of rows in sources.json, which earlier versions
        did not write; a folder without a config.yaml must be empty."""
        if not self.paths.config.is_file():
            self.check_unused()
            return
        try:
            saved = load_section(type(config), self.paths.config)
        except ConfigError as error:
            raise StorageError(
                f"{self.root} already holds other files ({self.paths.config.name}: {error}): choose another folder"
            ) from error
        before, now = saved.model_dump(mode="json"), config.model_dump(mode="json")
        if sources and self.paths.sources.is_file():
            before, now = before | {"sources": load_json(self.paths.sources)}, now | {"sources": dict(sources)}
        check_same(self.root, before, now, mutable_keys=mutable_keys)

    def begin(self, config: Section, sources: Mapping[str, str | None] | None = None) -> None:
        """Save the settings in config.yaml and the digests of rows in sources.json, and remove what a killed or failed
        process left, after all checks."""
        save_text(self.paths.config, dump_config(config))
        if sources:
            save_json(self.paths.sources, dict(sources))
        remove_leftovers(self.root)
        self.paths.error.unlink(missing_ok=True)


@contextmanager
def recorded_error(paths: RunPaths, step: int) -> Iterator[None]:
    """Within: an error that stops the run in `step` is saved in error.json."""
    try:
        yield
    except TunesmithError as error:
        with suppress(StorageError):  # the disk may be full, which the error itself says
            save_json(paths.error, {"step": step, "error": type(error).__name__, "message": str(error)})
        raise


@contextmanager
def open_part(out: Path, inputs: Mapping[str, Any]) -> Iterator[Journal]:
    """The finished parts of the new file `out`, in the journal `<out>.part`, which is removed once the file is there;
    ConfigError if the file exists, or for parts of other inputs than those in `<out>.part.json`."""
    part, record = (out.with_name(f"{out.name}.part{suffix}") for suffix in ("", ".json"))
    with Workspace(out, is_whole=True):
        if out.exists():
            raise ConfigError(f"{out} already exists; choose another file")
        remove_leftovers(out.parent, record.name)
        if not part.exists():
            save_json(record, dict(inputs))
        elif record.exists():  # earlier versions wrote none
            check_same(part, load_json(record), inputs)
        yield Journal(part)
        for path in (part, record):
            with storage_errors(path, "remove"):
                path.unlink(missing_ok=True)


def check_same(
    place: Path, saved: Mapping[str, Any], given: Mapping[str, Any], *, mutable_keys: Sequence[str] = ()
) -> None:
    """Raise ConfigError if a key outside `mutable_keys` changed; `place` is what was made from the saved inputs.

    Records of earlier versions lack some of the inputs, which are then not compared; some have a `digest` of all inputs
    alone.
    """
    keys = [key for key in given if key in saved and not (key == "digest" and "settings" in saved)]
    changes = find_changes({key: saved[key] for key in keys}, {key: given[key] for key in keys})
    refused = [change for key, change in changes.items() if not is_mutable_key(key, mutable_keys)]
    if refused:
        raise ConfigError(
            f"{place} was made with other settings: {'; '.join(refused)}. Restore them, or choose another output"
        )


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Dotted key -> how it changed, for the keys that did."""
    old, new = flatten(before), flatten(after)
    changes = {}
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        if was == now:
            continue
        name = key.removeprefix("settings.")
        if key == "digest":
            changes[name] = "which ones is unknown, as an earlier version wrote it"
        elif key.split(".")[0] not in CONTENTS:
            changes[name] = f"{name} was {was!r}, is {now!r}"
        elif None not in (was, now):
            changes[name] = f"the content of {name.removeprefix('sources.')} changed"
    if len(changes) > 1:
        changes.pop("digest", None)
    return changes


def is_mutable_key(key: str, mutable_keys: Sequence[str]) -> bool:
    return any(key == each or key.startswith(f"{each}.") for each in mutable_keys)


def compute_digest(value: Any) -> str:
    """SHA-256 of a value as JSON; of one that JSON does not have, such as an image, without its address."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=describe_value).encode()).hexdigest()


def describe_value(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))  # their order is another one in each process
    return ADDRESS.sub("", str(value))


def digest_rows(rows: Iterable[Any]) -> str | None:
    """The one digest of rows that inputs have: in their order, row by row, as a large data set is no text that fits in
    memory; None for rows without one, such as those with keys that JSON does not have, which are then not compared."""
    digest = hashlib.sha256()
    try:
        for row in rows:
            digest.update(compute_digest(row).encode())
    except (TypeError, ValueError, RecursionError):
        return None
    return digest.hexdigest()


def describe_rows(tasks: Sequence[Task]) -> list[list[Any]]:
    """What scores depend on in the rows of tasks; the code of workflow and judge is no part of it, only their names."""
    return [[task.task_id, dict(task.row)] for task in tasks]


def name_aside(path: Path, *, now: datetime | None = None) -> Path:
    """`path` with the time appended: an unused name for what is set aside."""
    stamped = path.with_name(f"{path.name}{now or datetime.now():%Y%m%d%H%M%S}")
    return next(each for each in iter_numbered(stamped) if not each.exists())


def iter_numbered(path: Path) -> Iterator[Path]:
    """`path`, and the names that take its place if it exists: with -2, -3, ... appended."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")
