"""A user function as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tunesmith.commands.stage import ChooseModel, StageResult
from tunesmith.config import FunctionStage
from tunesmith.errors import ConfigError
from tunesmith.runs.load_function import load_function
from tunesmith.storage import remove_tree, storage_errors


def check_stage(settings: FunctionStage) -> None:
    load_function(settings.function, knob="function")


def run_stage(settings: FunctionStage, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Call the function with a new, empty folder; output of an earlier attempt is removed."""
    function = load_function(settings.function, knob="function")
    if out_dir.exists():
        remove_tree(out_dir)
    with storage_errors(out_dir, "write"):
        out_dir.mkdir(parents=True)
    figures = function(out_dir, **settings.args)
    if figures is not None and not isinstance(figures, Mapping):
        raise ConfigError(f"function={settings.function!r} must return a mapping or None, got {type(figures).__name__}")
    return StageResult(figures={str(name): figure for name, figure in (figures or {}).items()})
