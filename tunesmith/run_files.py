"""Read and validate the file of each command before slow imports.

torch, transformers and datasets take seconds to import. Errors in files, overrides and paths are found here without
them, and the first console line of a run is printed before they are imported.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.cluster.place import find_place
from tunesmith.cluster.rank_errors import is_launched
from tunesmith.commands.prepare.flags import collect_values
from tunesmith.compat.trinity_yaml import is_trinity_file, translate_trinity_file
from tunesmith.config import (
    AuxiliaryModelSection,
    ConversationDataSection,
    DatasetSection,
    EvalConfig,
    ExpertSection,
    ExportSection,
    ModelSection,
    PreferenceConfig,
    PrepareSection,
    RunConfig,
    Section,
    SftConfig,
    SourceSection,
)
from tunesmith.config.environment.environment import BUILT_IN_TOOLS
from tunesmith.model.source.resolve import find_model
from tunesmith.runs.load_config import (
    config_schema,
    describe_options,
    dump_config,
    find_stage,
    load_config,
    load_section,
    load_values,
)
from tunesmith.runs.load_function import check_function
from tunesmith.tasks.data_path import check_data_path

logger = logging.getLogger(__name__)


def load_run_file(
    path: str | Path | None, overrides: Sequence[str] = (), *, values: Mapping[str, Any] | None = None
) -> RunConfig:
    """Read a run file, or a Trinity-RFT file, whose keys are translated or refused one by one."""
    if path is not None and is_trinity_file(trinity_values := load_values(path)):
        translation = translate_trinity_file(trinity_values)
        for note in translation.notes:
            logger.warning("%s: %s", path, note)
        return load_config(None, overrides, values=values, base=translation.values)
    return load_config(path, overrides, values=values)


def load_eval_file(path: str, overrides: Sequence[str] = ()) -> RunConfig | EvalConfig:
    """Read a run file, or an evaluation file with `models`."""
    if "models" in load_values(path):
        return load_section(EvalConfig, path, overrides)
    return load_run_file(path, overrides)


def load_sft_file(path: str, overrides: Sequence[str] = ()) -> SftConfig:
    return load_section(SftConfig, path, overrides)


def load_preference_file(path: str, overrides: Sequence[str] = ()) -> PreferenceConfig:
    return load_section(PreferenceConfig, path, overrides)


def load_prepare_file(path: str | None, overrides: Sequence[str], **flags: Any) -> PrepareSection:
    """Read a preparation file, if any, and apply the values of command-line flags."""
    return load_section(PrepareSection, path, overrides, values=collect_values(**flags))


def load_export_settings(given: Mapping[str, Any], overrides: Sequence[str]) -> ExportSection:
    """The export section of command-line flags and overrides; flags that are None are unset."""
    values = {key: value for key, value in given.items() if value is not None}
    return load_section(ExportSection, None, overrides, values=values)


def format_config(stage: str, path: str | None, overrides: Sequence[str]) -> str:
    """The resolved config of a command's file as YAML."""
    if stage == "tune":
        return dump_config(load_run_file(path, overrides))
    return dump_config(load_section(find_stage(stage), path, overrides))


def format_schema(stage: str) -> str:
    return json.dumps(config_schema(find_stage(stage)), indent=2)


def format_options(stage: str) -> str:
    """Every key of a command's file: one line with type and default, one with the description."""
    listed = describe_options(find_stage(stage))
    return "\n".join(
        f"{each.key}: {each.type} = {each.default}{f' (needs {each.needs})' if each.needs else ''}\n"
        f"    {' '.join(each.description.split())}"
        for each in listed
    )


def collect_overrides(overrides: list[str] | None, *, workflow: str | None, judge: str | None) -> list[str]:
    named = [f"{key}={value}" for key, value in (("workflow", workflow), ("judge", judge)) if value is not None]
    return [*(overrides or []), *named]


def collect_resuming(*, resume: bool, step: int | None) -> list[str]:
    """The overrides of the options `--resume` and `--resume-from`."""
    return [
        *(["continue_from_checkpoint=true"] if resume or step is not None else []),
        *([] if step is None else [f"resume_from_step={step}"]),
    ]


def is_first_rank() -> bool:
    """Whether this process writes the run's console and files: the only one, or the first of several ranks."""
    return find_place().is_first


def is_launcher(config: RunConfig) -> bool:
    """Whether this process is to start the ranks of the run on this host: it is none of them itself."""
    if config.cluster.launcher != "torchrun":
        return False
    return find_place().world_size == 1 and (config.cluster.num_workers or 1) > 1


def collect_ranks(*, gpus: int | None, ranks: int | None) -> list[str]:
    """The override of the command's options `--gpus` and `--ranks`."""
    if gpus is not None and ranks is not None:
        raise ValueError(f"--gpus {gpus} and --ranks {ranks}: give only one of them; --gpus starts a rank on each GPU")
    number = ranks if gpus is None else gpus
    return [] if number is None else [f"cluster.num_workers={number}"]


def collect_models(given: list[str]) -> dict[str, str]:
    """Label -> path; a path without a label, or an existing path that contains '=', is its own label."""
    models: dict[str, str] = {}
    for each in given:
        label, equals, path = each.partition("=")
        if not equals or "/" in label or Path(each).exists():
            label = path = each
        if label in models:
            raise ValueError(f"--model has the label {label!r} twice; use distinct labels, as LABEL=PATH")
        models[label] = path
    return models


def check_paths(config: Section, *, has_models: bool = True) -> None:
    """Raise if model paths, data paths or files of functions do not exist. Evaluations resolve models differently and
    pass `has_models=False`."""
    for section in iter_sections(config):
        match section:
            case ModelSection() if has_models:
                find_model(section.path, section.base_path)
            case AuxiliaryModelSection(base_url=None):
                find_model(section.path)
            case DatasetSection() | SourceSection() | ExpertSection():
                check_data_path(section.path)
            case ConversationDataSection():
                for path in [section.path] if isinstance(section.path, str) else section.path:
                    check_data_path(path)
    if isinstance(config, RunConfig | EvalConfig):
        for knob, spec in list_function_knobs(config):
            check_function(spec, knob=knob)


def list_paths(config: RunConfig) -> list[str]:
    """Paths of models, data and files of functions that the config names; some may be hub ids."""
    paths: list[str] = []
    for section in iter_sections(config):
        match section:
            case ModelSection():
                paths += [path for path in (section.path, section.base_path) if path is not None]
            case AuxiliaryModelSection(base_url=None) | DatasetSection() | SourceSection() | ExpertSection():
                paths.append(section.path)
    return paths + [spec.rpartition(":")[0] for _, spec in list_function_knobs(config) if ".py:" in spec]


def list_function_knobs(config: RunConfig | EvalConfig) -> list[tuple[str, str]]:
    """Knobs that name a function, and their values, as far as they are set."""
    named = {"workflow": config.workflow, "judge": config.judge}
    if isinstance(config, RunConfig):
        named |= {"algorithm.advantage": config.algorithm.advantage, "algorithm.loss": config.algorithm.loss}
        named |= {f"callbacks.{name}": spec for name, spec in config.callbacks.model_dump().items()}
    tools = [each.tool for each in config.environment.tools if each.tool not in BUILT_IN_TOOLS]
    named |= {f"environment.tools: {spec}": spec for spec in tools}
    return [(knob, spec) for knob, spec in named.items() if spec is not None]


def iter_sections(value: Any) -> Iterator[Section]:
    """A section and all nested sections."""
    if isinstance(value, Section):
        yield value
        for name in type(value).model_fields:
            yield from iter_sections(getattr(value, name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from iter_sections(inner)


def check_and_announce(command: str, config: Section, subject: str, *, has_models: bool = True) -> None:
    """Check paths, then print the first line of a command on stderr unless `has_progress` is false.

    Of several ranks only the first prints it, and none if their launcher has.
    """
    check_paths(config, has_models=has_models)
    if is_first_rank() and not is_launched() and getattr(getattr(config, "monitor", config), "has_progress", True):
        print(f"{command}: {subject}", file=sys.stderr, flush=True)
