"""Load and check the settings that public functions receive: an object, a file, or AgentScope's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.compat.agentscope_config import translate_tune_arguments
from tunesmith.config import RunConfig, Section
from tunesmith.errors import ConfigError
from tunesmith.run_files import load_run_file
from tunesmith.runs.load_config import change_section

PathLike = str | Path
AnySection = TypeVar("AnySection", bound=Section)


def load_settings(
    kind: type[AnySection],
    config: AnySection | PathLike,
    overrides: Sequence[str],
    load_file: Callable[[str, Sequence[str]], AnySection],
) -> AnySection:
    """The config with the overrides applied, read from its file if it is a path."""
    if isinstance(config, kind):
        return change_section(config, overrides)
    return load_file(str(check_path(config, kind)), overrides)


def load_tune_config(
    config: RunConfig | PathLike | None,
    objects: dict[str, Any],
    config_path: PathLike | None,
    overrides: Sequence[str],
    *,
    values: Mapping[str, Any],
) -> RunConfig:
    """The run config of either form of `tune`, with nested `values` and then the overrides applied."""
    if config is not None:
        refuse_both_forms(objects | {"config_path": config_path})
    elif objects["model"] is None and config_path is None and not any(o.startswith("model.path=") for o in overrides):
        raise ConfigError(
            "model is missing: give tune() a config, a TunerModelConfig, or a config_path that sets model.path"
        )
    values = {**translate_tune_arguments(**objects), **values}
    if isinstance(config, RunConfig):
        return change_section(config, overrides, values=values)
    return load_run_file(check_path(config, RunConfig) or config_path, overrides, values=values)


def check_path(config: object, kind: type[Section]) -> PathLike | None:
    """The path in place of a config; raises ConfigError for any other object."""
    if config is None or isinstance(config, str | Path):
        return config
    raise ConfigError(f"config must be of type {kind.__name__} or the path of a YAML file, got {type(config).__name__}")


def refuse_both_forms(objects: Mapping[str, Any]) -> None:
    """Raise ConfigError if arguments of AgentScope's form are given beside `config`."""
    names = [name for name, value in objects.items() if value is not None]
    if names:
        raise ConfigError(
            f"tune() got config and {', '.join(names)}: config holds every setting, so put these into it, or change "
            "single keys with overrides=['key=value']"
        )
