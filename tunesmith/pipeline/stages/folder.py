"""The folder of a pipeline, and what it remembers of each stage.

    pipeline.yaml                 the settings     report.md  report.json  what came of it
    NAME/                         what the stage NAME made; a training run's own folder for sft and rl
    stages/NAME/START.json        what the stage was begun with, and how long each attempt at it took
    stages/NAME/DONE.json         that it is whole, what it left, and its figures; written last

A stage is done when its DONE.json has the digest of its settings and the marks of the stages that it was made from. A
mark is new whenever a stage is made, so what was made from an older one is made again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from tunesmith.errors import StorageError
from tunesmith.model.checkpoint import check_complete
from tunesmith.pipeline.eval.compare import JSON_FILE
from tunesmith.pipeline.session.run_folder import MUTABLE_KEYS as RL_MUTABLE_KEYS
from tunesmith.pipeline.session.run_folder import flatten, is_mutable_key
from tunesmith.pipeline.sft.folder import MUTABLE_KEYS as SFT_MUTABLE_KEYS
from tunesmith.pipeline.stages.plan import PlannedStage
from tunesmith.storage import load_json, remove_tree, save_json, storage_errors

CONFIG_FILE, REPORT_TABLE, REPORT_JSON = "pipeline.yaml", "report.md", "report.json"
STATES = "stages"
START, DONE = "START.json", "DONE.json"
MUTABLE_KEYS: Mapping[str, Sequence[str]] = {"rl": RL_MUTABLE_KEYS, "sft": SFT_MUTABLE_KEYS, "prefer": SFT_MUTABLE_KEYS}
"""Kinds whose runs go on under settings that differ in these alone."""

State = Literal["done", "begun", "changed", "new"]
"""What a stage is before it runs: done as asked for; begun with these settings and to be gone on with; made or begun
with other settings or from other stages, to be set aside; or not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a stage was begun with."""

    digest: str
    values: Mapping[str, Any]
    made_from: Mapping[str, str]
    """The marks of the stages that it needs."""
    attempts: Sequence[float | None]
    """Seconds of each attempt; None for one that was killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a stage left."""

    digest: str
    mark: str
    made_from: Mapping[str, str]
    ended: str
    """Date and time."""
    seconds: float
    """Of all attempts that ended by themselves."""
    num_attempts: int
    num_killed: int
    """Attempts of which the seconds are not known."""
    model: str | None
    """The model that references to the stage mean, as seen from the pipeline's folder."""
    tokens: int | None
    """Tokens sampled, or trained by fine-tuning; None where the stage did neither."""
    device: str | None
    """Where its model was."""
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PipelineFolder:
    """Where the files of one pipeline are."""

    root: Path

    def place(self, name: str) -> Path:
        """What the stage makes goes here."""
        return self.root / name

    def load_start(self, name: str) -> Start | None:
        path = self.root / STATES / name / START
        return Start(**load_json(path)) if path.exists() else None

    def load_done(self, name: str) -> Done | None:
        path = self.root / STATES / name / DONE
        if not path.exists():
            return None
        try:
            return Done(**load_json(path))
        except TypeError as error:
            raise StorageError(
                f"{path} is damaged or of another version ({error}): remove it, and the stage is looked at anew"
            ) from error

    def check_output(self, stage: PlannedStage) -> None:
        """Refuse a stage that is done when what it left is not there in full."""
        done, place = self.load_done(stage.name), self.place(stage.name)
        assert done is not None
        try:
            if done.model is not None and stage.kind != "export":
                check_complete(self.root / done.model)
            elif stage.kind in ("prepare", "export"):
                check_complete(place)
            elif stage.kind == "eval":
                load_json(place / JSON_FILE)
            if not place.exists():
                raise StorageError(f"{place} is gone")
        except StorageError as error:
            raise StorageError(
                f"stage {stage.name!r} is done, but what it left is not whole: {error}; put it back, or make it again "
                f"with --only {stage.name} --again"
            ) from error

    def find_state(self, stage: PlannedStage) -> State:
        """What the stage is before it runs."""
        start, done = self.load_start(stage.name), self.load_done(stage.name)
        made_from = self.find_marks(stage)
        if done is not None and (done.digest, done.made_from) == (stage.digest, made_from):
            return "done"
        if start is None:
            return "new"
        return "begun" if start.made_from == made_from and is_same_stage(start, stage) else "changed"

    def find_marks(self, stage: PlannedStage) -> dict[str, str | None]:
        """The marks of the stages that it needs as they are now; None for one that is not done."""
        done = {name: self.load_done(name) for name in stage.needs}
        return {name: None if each is None else each.mark for name, each in done.items()}

    def begin(self, stage: PlannedStage) -> None:
        """Note an attempt, whose seconds are not known yet. An older DONE.json no longer holds."""
        state = self.root / STATES / stage.name
        old = self.load_start(stage.name)
        made_from = {name: mark for name, mark in self.find_marks(stage).items() if mark is not None}
        assert made_from.keys() == set(stage.needs), "the stages that it needs are done"
        attempts = [] if old is None else list(old.attempts)
        start = Start(digest=stage.digest, values=stage.values, made_from=made_from, attempts=[*attempts, None])
        with storage_errors(state, "write"):
            (state / DONE).unlink(missing_ok=True)
        save_json(state / START, asdict(start))

    def end_attempt(self, name: str, seconds: float) -> None:
        """Note how long the last attempt took, however it ended."""
        start = self.load_start(name)
        assert start is not None
        save_json(self.root / STATES / name / START, asdict(replace(start, attempts=[*start.attempts[:-1], seconds])))

    def finish(
        self,
        stage: PlannedStage,
        *,
        model: Path | None,
        tokens: int | None,
        device: str | None,
        figures: Mapping[str, Any],
    ) -> None:
        """Note that the stage is whole."""
        start = self.load_start(stage.name)
        assert start is not None
        known = [seconds for seconds in start.attempts if seconds is not None]
        done = Done(
            digest=stage.digest,
            mark=secrets.token_hex(8),
            made_from=start.made_from,
            ended=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            seconds=sum(known),
            num_attempts=len(start.attempts),
            num_killed=len(start.attempts) - len(known),
            model=None if model is None else str(model.relative_to(self.root)),
            tokens=tokens,
            device=device,
            figures=figures,
        )
        save_json(self.root / STATES / stage.name / DONE, asdict(done))

    def set_aside(self, name: str) -> Path | None:
        """Make room for the stage to be made anew; returns where the old one is now, None when it made nothing."""
        state, place, aside = self.root / STATES / name, self.place(name), None
        if place.exists():
            aside = self.choose_name(f"{name}.old-{datetime.now():%Y%m%d%H%M%S}")
            with storage_errors(place, "rename"):
                place.rename(aside)
        if state.exists():
            remove_tree(state)
        return aside

    def choose_name(self, wanted: str) -> Path:
        """A name in the folder that nothing has."""
        names = (wanted if number == 0 else f"{wanted}-{number}" for number in range(1000))
        return next(path for name in names if not (path := self.root / name).exists())


def is_same_stage(start: Start, stage: PlannedStage) -> bool:
    """Whether what was begun may be gone on with: the same settings, or others in what may change in a run."""
    if start.digest == stage.digest:
        return True
    mutable_keys = MUTABLE_KEYS.get(stage.kind)
    if mutable_keys is None:
        return False
    before, after = flatten(start.values), flatten(stage.values)
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    return all(is_mutable_key(key, mutable_keys) for key in changed)
