"""Workflows and judges by path: the only code that a run file may name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tunesmith.config import RunConfig
from tunesmith.errors import ConfigError
from tunesmith.types import JudgeType, WorkflowType


def load_function(spec: str, *, knob: str) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ConfigError(f"{knob}={spec!r} is not of the form module:function or file.py:function")
    module = _load_file(Path(place), knob=knob) if place.endswith(".py") else _load_module(place, knob=knob)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{knob}={spec!r}: {place} has no function {name!r}")
    return function


def load_functions(config: RunConfig) -> tuple[WorkflowType, JudgeType | None]:
    """The workflow and judge that a config names."""
    if config.workflow is None:
        raise ConfigError(
            "workflow is missing: name the agent as file.py:function (--workflow, or workflow: in the file)"
        )
    judge = None if config.judge is None else load_function(config.judge, knob="judge")
    return load_function(config.workflow, knob="workflow"), judge


def load_part(spec: str, *, knob: str) -> Callable[..., Any]:
    """As `load_function`; `module.name` is understood too."""
    if ":" not in spec:
        place, _, name = spec.rpartition(".")
        spec = f"{place}:{name}"
    return load_function(spec, knob=knob)


def _load_file(path: Path, *, knob: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{knob}: no file {str(path)!r}; give the path of the python file that holds the function")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    module_name = f"tunesmith_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{knob}: {str(path)!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str, *, knob: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{knob}: no module {error.name!r}; install it or give file.py:function") from error
