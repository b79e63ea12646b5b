"""The settings of a command: read, checked and announced before slow imports.

torch, transformers and datasets take seconds to import. Errors in files, overrides and paths are found here without
them, and the first console line of a run is printed before they are imported. The command line and the Python functions
both load their settings by `load_settings`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, cast

from tunesmith.arguments import check_list
from tunesmith.cluster.rank_info import find_rank_info, is_launched
from tunesmith.commands.table import Command, import_named, list_config_classes
from tunesmith.compat.trinity_yaml import ALGORITHM, is_trinity_file, load_trinity_file
from tunesmith.config import (
    AuxiliaryModelSection,
    ConversationDataSection,
    EvalConfig,
    ModelSection,
    PreferenceConfig,
    RunConfig,
    Section,
    SftConfig,
)
from tunesmith.config.environment import BUILT_IN_TOOLS
from tunesmith.config.section import DataSection
from tunesmith.errors import ConfigError, errors_of
from tunesmith.model.source.resolve import find_model
from tunesmith.runs.load_config import (
    AnySection,
    change_section,
    describe_options,
    dump_config,
    load_section,
    load_yaml,
)
from tunesmith.runs.load_function import CustomComponents, check_function
from tunesmith.tasks.data_path import check_data_path

logger = logging.getLogger(__name__)
PathLike = str | Path
OVERRIDES_VARIABLE = "TUNESMITH_SET"
SERVER_MODEL = re.compile(r"(?P<base_url>https?://.+?/v\d+)/(?P<model>.+)")


def load_settings(
    command: Command, config: object = None, overrides: Sequence[str] = (), *, values: Mapping[str, Any] | None = None
) -> Any:
    """The settings of a command from its file, its config object, or nothing; with nested `values`, the overrides of
    the environment variable and then these overrides applied."""
    assert command.config is not None
    check_overrides(overrides)
    overrides = [*read_variable(), *overrides]
    kinds = tuple(import_named(each) for each in command.takes or (command.config,))
    if isinstance(config, kinds):
        return change_section(config, overrides, values=values)
    if not isinstance(config, str | Path) and (config is not None or command.load is not None):
        name = kinds[-1].__name__
        raise ConfigError(f"config must be of type {name} or the path of a YAML file, got {type(config).__name__}")
    if command.load is not None:
        return import_named(command.load)(config, overrides)
    return load_file(kinds[-1], config, overrides, values=values)


def check_overrides(overrides: object) -> None:
    """Raise unless overrides are a list of texts: a text alone would be read letter by letter."""
    check_list("overrides", overrides, lambda each: isinstance(each, str), items="'key=value' texts, as ['seed=1']")


def read_variable() -> list[str]:
    """The overrides in TUNESMITH_SET, separated by spaces: a program or file as it is, with other numbers."""
    return shlex.split(os.environ.get(OVERRIDES_VARIABLE, ""))


def load_run_file(path: PathLike | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file, or a Trinity-RFT file, whose keys are translated or refused one by one."""
    return load_file(RunConfig, path, overrides)


def load_file(
    kind: type[AnySection],
    path: PathLike | None,
    overrides: Sequence[str] = (),
    *,
    values: Mapping[str, Any] | None = None,
) -> AnySection:
    """Read a file of a command, or a Trinity-RFT file for it."""
    given = {} if path is None or kind not in TRANSLATED.values() else load_yaml(Path(path))
    if isinstance(given.get("stages"), Mapping):  # a list in Trinity-RFT's files
        raise ConfigError(f"{path} is a pipeline file: `tunesmith run {path}` runs its stages, --check lists them")
    if path is None or not is_trinity_file(given):
        return load_section(kind, path, overrides, values=values)
    algorithm = dict((values or {}).get("algorithm", {}))
    if (name := algorithm.pop("algorithm_type", None)) is not None:
        values, overrides = {**(values or {}), "algorithm": algorithm}, [f"{ALGORITHM}={name}", *overrides]
    translation, own = load_trinity_file(Path(path), overrides)
    if kind is not TRANSLATED[translation.command]:
        raise ConfigError(f"{path} is a file for `tunesmith {translation.command}`: its algorithm trains on other data")
    for note in translation.notes:
        logger.warning("%s: %s", path, note)
    settings: Any = load_section(kind, None, own, values=values, base=translation.values)
    # the file's arguments were moved as they are; translating it has imported torch, which this check needs
    import_named("tunesmith.algorithms.algorithm:load_algorithm")(settings.algorithm, CustomComponents().load)
    return cast(AnySection, settings)


TRANSLATED: dict[str, type[Section]] = {"tune": RunConfig, "sft": SftConfig, "prefer": PreferenceConfig}
"""Command of a translated file -> its config."""


def load_eval_file(path: PathLike, overrides: Sequence[str] = ()) -> RunConfig | EvalConfig:
    """Read a run file, or an evaluation file with `models`."""
    if "models" in load_yaml(Path(path)):
        return load_section(EvalConfig, path, overrides)
    return load_run_file(path, overrides)


def describe(
    config: str | None = None,
    *,
    overrides: Sequence[str] = (),
    stage: str = "tune",
    schema: bool = False,
    options: bool = False,
    algorithms: bool = False,
) -> str:
    """What `tunesmith config` prints: the resolved file of a command or stage, its JSON schema, its keys, or the
    algorithms."""
    kinds = {"--schema": schema, "--options": options, "--algorithms": algorithms}
    chosen = [name for name, is_chosen in kinds.items() if is_chosen]
    given = {"a file": config, "--set": overrides, **dict.fromkeys(chosen[1:], True)}
    if chosen and (ignored := [name for name, value in given.items() if value]):
        raise ValueError(f"{', '.join(ignored)} has no effect with {chosen[0]}: leave it out")
    if schema:
        return json.dumps(find_config_class(stage).model_json_schema(), indent=2)
    if options:
        return "\n".join(
            f"{each.key}: {each.type} = {each.default}{f' (needs {each.needs})' if each.needs else ''}\n"
            f"    {' '.join(each.description.split())}"
            for each in describe_options(find_config_class(stage))
        )
    if algorithms:
        return str(import_named("tunesmith.algorithms.algorithm:describe_algorithms")())
    return dump_config(load_file(find_config_class(stage), config, overrides)).removesuffix("\n")


def find_config_class(stage: str) -> type[Section]:
    """The config class of a kind of file."""
    classes = list_config_classes()
    if stage not in classes:
        raise ConfigError(f"stage {stage!r}: allowed are {', '.join(classes)}")
    found: type[Section] = classes[stage]
    return found


def collect_models(given: Sequence[str], *, option: str = "--model") -> dict[str, str]:
    """Label -> path; a path without a label, or an existing path that contains '=', is its own label."""
    models: dict[str, str] = {}
    for each in given:
        label, equals, path = each.partition("=")
        if not equals or "/" in label or Path(each).exists():
            label = path = each
        if not path:
            raise ConfigError(f"{option} {each!r} has no path; write LABEL=PATH, as in base=models/base")
        if label in models:
            raise ConfigError(f"{option} has the label {label!r} twice; use distinct labels, as LABEL=PATH")
        models[label] = path
    return models


def read_teacher(text: str) -> dict[str, str]:
    """The section of a model on a server."""
    found = parse_server_url(text, option="--teacher")
    return {"base_url": found["base_url"], "path": found["model"]}


def parse_server_url(text: str, *, option: str = "--paraphrase") -> dict[str, str]:
    """Split `http://localhost:8000/v1/my-model` into base URL and model name."""
    found = SERVER_MODEL.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{option} {text!r} is not of the form BASE_URL/MODEL, as in http://localhost:8000/v1/my-model"
        )
    return found.groupdict()


def parse_model_names(models: Sequence[str]) -> dict[str, dict[str, str]]:
    """The models of `--pass-rate`; the last part of a path without a name, in lower case with underscores for dashes,
    is its name."""
    named = (each if "=" in each else f"{PurePosixPath(each).name.lower().replace('-', '_')}={each}" for each in models)
    return {name: {"path": path} for name, path in collect_models(list(named), option="--pass-rate").items()}


def read_task(text: str) -> int | dict[str, Any]:
    """The value of `tunesmith check --task`."""
    value = read_json(text)
    if isinstance(value, dict) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"--task={text!r} must be the number of a row, or the task as a JSON object")


def read_arguments(text: str) -> dict[str, Any]:
    """The value of `tunesmith environments show --args`."""
    if isinstance(value := read_json(text), dict):
        return value
    raise ConfigError(f"--args={text!r} must be a JSON object")


def read_json(text: str) -> Any:
    """The value of an option in JSON; None for other text."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def check_paths(config: Section, *, has_models: bool = True) -> None:
    """Raise if model paths, data paths or files of functions do not exist. Evaluations resolve models differently and
    pass `has_models=False`."""
    for key, section in iter_sections(config):
        match section:
            case ModelSection() if has_models:
                with errors_of(key, ModelSection.model_fields):
                    find_model(section.path, section.base_path)
            case AuxiliaryModelSection(base_url=None):
                with errors_of(key, AuxiliaryModelSection.model_fields):
                    find_model(section.path)
            case DataSection() | ConversationDataSection():
                for path in [section.path] if isinstance(section.path, str) else section.path:
                    check_data_path(path, knob=f"{key}.path")
    if isinstance(config, RunConfig | EvalConfig):
        for knob, spec in list_function_knobs(config):
            check_function(spec, knob=knob)


def list_paths(config: RunConfig) -> list[str]:
    """Paths of models, data and files of functions that the config names; some may be hub ids."""
    paths: list[str] = []
    for _, section in iter_sections(config):
        match section:
            case ModelSection():
                paths += [path for path in (section.path, section.base_path) if path is not None]
            case AuxiliaryModelSection(base_url=None) | DataSection():
                paths.append(section.path)
    return paths + [spec.rpartition(":")[0] for _, spec in list_function_knobs(config) if ".py:" in spec]


def list_function_knobs(config: RunConfig | EvalConfig) -> list[tuple[str, str]]:
    """Knobs that name a function, and their values, as far as they are set."""
    named = {"workflow": config.workflow, "judge": config.judge}
    if config.environment.name is not None and ".py:" in config.environment.name:
        named["environment"] = config.environment.name
    if isinstance(config, RunConfig):
        named |= {"algorithm.advantage": config.algorithm.advantage, "algorithm.loss": config.algorithm.loss}
        named |= {f"callbacks.{name}": spec for name, spec in config.callbacks.model_dump().items()}
    tools = [each.tool for each in config.environment.tools if each.tool not in (None, *BUILT_IN_TOOLS)]
    named |= {f"environment.tools: {spec}": spec for spec in tools}
    return [(knob, spec) for knob, spec in named.items() if spec is not None]


def iter_sections(value: Any, key: str = "") -> Iterator[tuple[str, Section]]:
    """A section and those inside of it, with their dotted keys."""
    if isinstance(value, Section):
        yield key, value
        for name in type(value).model_fields:
            yield from iter_sections(getattr(value, name), f"{key}.{name}".lstrip("."))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from iter_sections(inner, f"{key}.{name}".lstrip("."))


def announce(command: str, config: Section, subject: str) -> None:
    """Print the first line of a command on stderr, unless `has_progress` is false.

    Of several ranks only the first prints it, and none if their launcher has.
    """
    is_shown = getattr(getattr(config, "monitor", config), "has_progress", True)
    if is_shown and find_rank_info().is_first and not is_launched():
        print(f"{command}: {subject}", file=sys.stderr, flush=True)
