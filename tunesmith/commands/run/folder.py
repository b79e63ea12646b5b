"""The folder of a pipeline and the records of its stages.

    pipeline.yaml                 the settings     report.md  report.json  radar.png  the report
    NAME/                         output of stage NAME; for sft, prefer and rl its run folder
    stages/NAME/START.json        settings and inputs of the current run of the stage, and the seconds of each attempt
    stages/NAME/DONE.json         results and figures of a complete stage; written last

A stage is done if its DONE.json has the digest of the current settings and the current mark of each input stage. The
mark is a random id, new each time a stage runs, so a stage whose inputs were rebuilt is rebuilt too.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tunesmith.commands.run.config import PlannedStage
from tunesmith.commands.stage import StageResult
from tunesmith.commands.table import STAGES, import_named
from tunesmith.errors import StorageError
from tunesmith.runs.workspace import find_changes, is_mutable_key, name_aside
from tunesmith.storage import DONE, check_complete, load_json, remove_tree, save_json, storage_errors

CONFIG_FILE, REPORT_TABLE, REPORT_JSON = "pipeline.yaml", "report.md", "report.json"
STATES = "stages"
START = "START.json"

State = Literal["done", "begun", "changed", "new"]
"""State of a stage before it runs. `done`: complete with these settings and inputs; `begun`: unfinished with these
settings and inputs, can be resumed; `changed`: has output of other settings or inputs; `new`: never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    """START.json: settings and inputs of a started stage. The field names are its keys."""

    digest: str
    values: Mapping[str, Any]
    made_from: Mapping[str, str]
    """Marks of the input stages."""
    attempts: Sequence[float | None]
    """Seconds of each attempt; None for one that was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneRecord:
    """DONE.json: results of a complete stage. The field names are its keys."""

    digest: str
    mark: str
    made_from: Mapping[str, str]
    ended: str
    """Local date and time."""
    seconds: float
    """Total time of all attempts that were not killed."""
    num_attempts: int
    num_killed: int
    """Attempts that were killed, whose time is unknown."""
    model: str | None
    """The model that `stage:NAME` refers to, relative to the pipeline's folder."""
    tokens: int | None
    """Sampled tokens, or trained tokens for fine-tuning; None if the stage did neither."""
    device: str | None
    """Device of the stage's model."""
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """Files and stage records of one pipeline."""

    root: Path

    def output_folder(self, name: str) -> Path:
        """Folder of the stage's output."""
        return self.root / name

    def load_start(self, name: str) -> StartRecord | None:
        path = self.root / STATES / name / START
        return StartRecord(**load_json(path)) if path.exists() else None

    def load_done(self, name: str) -> DoneRecord | None:
        path = self.root / STATES / name / DONE
        if not path.exists():
            return None
        try:
            return DoneRecord(**load_json(path))
        except TypeError as error:
            raise StorageError(
                f"{path} is damaged or of another version ({error}): remove it to check the stage again"
            ) from error

    def check_output(self, stage: PlannedStage) -> None:
        """Raise StorageError if output of a completed stage is missing or damaged."""
        done, output = self.load_done(stage.name), self.output_folder(stage.name)
        assert done is not None
        try:
            match STAGES[stage.kind].output:
                case "model":
                    check_complete(self.root / str(done.model))
                case "folder":
                    check_complete(output)
                case str(file):
                    load_json(output / file)
            if not output.exists():
                raise StorageError(f"{output} is missing")
        except StorageError as error:
            raise StorageError(
                f"stage {stage.name!r} is done, but its output is incomplete: {error}; restore it, or run the stage "
                f"again with --only {stage.name} --again"
            ) from error

    def find_state(self, stage: PlannedStage) -> State:
        """State of the stage before it runs."""
        start, done = self.load_start(stage.name), self.load_done(stage.name)
        made_from = self.find_marks(stage)
        if done is not None and (done.digest, done.made_from) == (stage.digest, made_from):
            return "done"
        if start is None:
            return "new"
        return "begun" if start.made_from == made_from and is_same_stage(start, stage) else "changed"

    def find_marks(self, stage: PlannedStage) -> dict[str, str | None]:
        """Current marks of the input stages; None for one that is not done."""
        done = {name: self.load_done(name) for name in stage.needs}
        return {name: None if each is None else each.mark for name, each in done.items()}

    def begin(self, stage: PlannedStage) -> None:
        """Record a new attempt, with unknown duration, and remove an earlier DONE.json."""
        state = self.root / STATES / stage.name
        old = self.load_start(stage.name)
        made_from = {name: mark for name, mark in self.find_marks(stage).items() if mark is not None}
        assert made_from.keys() == set(stage.needs), "all input stages are done"
        attempts = [] if old is None else list(old.attempts)
        start = StartRecord(digest=stage.digest, values=stage.values, made_from=made_from, attempts=[*attempts, None])
        with storage_errors(state, "write"):
            (state / DONE).unlink(missing_ok=True)
        save_json(state / START, asdict(start))

    def end_attempt(self, name: str, seconds: float) -> None:
        """Record the duration of the last attempt, whether it succeeded or failed."""
        start = self.load_start(name)
        assert start is not None
        save_json(self.root / STATES / name / START, asdict(replace(start, attempts=[*start.attempts[:-1], seconds])))

    def finish(self, stage: PlannedStage, result: StageResult) -> None:
        """Write DONE.json."""
        start = self.load_start(stage.name)
        assert start is not None
        known = [seconds for seconds in start.attempts if seconds is not None]
        done = DoneRecord(
            digest=stage.digest,
            mark=secrets.token_hex(8),
            made_from=start.made_from,
            ended=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            seconds=sum(known),
            num_attempts=len(start.attempts),
            num_killed=len(start.attempts) - len(known),
            model=None if result.model is None else str(result.model.relative_to(self.root)),
            tokens=result.tokens,
            device=result.device,
            figures=result.figures,
        )
        save_json(self.root / STATES / stage.name / DONE, asdict(done))

    def set_aside(self, name: str) -> Path | None:
        """Rename the stage's output and remove its records; returns the new path, None if there was no output."""
        state, output, aside = self.root / STATES / name, self.output_folder(name), None
        if output.exists():
            aside = name_aside(self.root / f"{name}.old-")
            with storage_errors(output, "rename"):
                output.rename(aside)
        if state.exists():
            remove_tree(state)
        return aside


def is_same_stage(start: StartRecord, stage: PlannedStage) -> bool:
    """Whether an unfinished stage can be resumed: equal settings, or changes only in keys that may change in a run."""
    if start.digest == stage.digest:
        return True
    keys = STAGES[stage.kind].mutable_keys
    if keys is None:
        return False
    mutable_keys = import_named(keys)
    return all(is_mutable_key(key, mutable_keys) for key in find_changes(start.values, stage.values))
