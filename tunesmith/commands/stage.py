"""What a stage of a pipeline gives back, and the checks that stages share.

A check runs before the first stage does, with references to earlier stages unresolved (`stage:NAME`): what they name
may not exist yet and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tunesmith.commands.references import list_strings, read_reference
from tunesmith.config import EnvironmentSection, ModelSection, RunConfig
from tunesmith.model.load import check_section, explain_missing_gpu, resolve_device
from tunesmith.model.memory import MemorySettings
from tunesmith.runs.load_function import has_environment_tasks, load_functions
from tunesmith.runs.memory import describe_memory
from tunesmith.runs.policy import BuildModel
from tunesmith.runs.tasks import load_run_tasks
from tunesmith.tasks.load import load_rows

TABLES = "tables"
"""Name of the figure that holds Markdown tables instead of a single value."""
RADAR = "radar"
"""Name of the figure that holds the measures of behavior of an evaluation, by task set, model and axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """Result of a stage, in addition to its files."""

    model: Path | None = None
    tokens: int | None = None
    device: str | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Values in the report, by their label."""
    result: Any = None
    """The command's own result, where the table of commands names further figures of it."""


ChooseModel = Callable[[RunConfig], BuildModel]
"""Returns the builder of the `model` that the workflows of a run receive."""


def describe_device(device: str, num_cpu_threads: int) -> str:
    """Name of the GPU, or the device type and its number of threads."""
    found = resolve_device(device)
    if found.type == "cuda":
        return torch.cuda.get_device_name(found)
    return f"{found.type}, {num_cpu_threads} {'thread' if num_cpu_threads == 1 else 'threads'}"


def describe_run(model: PreTrainedModel, section: ModelSection, root: Path, memory: MemorySettings) -> list[str]:
    """What is trained, on which device and why, with how much memory, and where to look: the first lines of a run whose
    model is loaded."""
    num_trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    num_own = model.num_parameters() - (0 if section.lora is None else num_trained)
    trained = "all weights" if section.lora is None else f"an adapter of {format_count(num_trained)} parameters"
    return [
        f"model   {section.path}, {format_count(num_own)} parameters, {str(model.dtype).removeprefix('torch.')}",
        f"trains  {trained}",
        f"device  {explain_device(model.device, section.device)}",
        *describe_memory(model, memory),
        f"folder  {root}",
        f"watch   tunesmith view {root}",
    ]


def format_count(number: int) -> str:
    """`4,096`, `494.0 M` or `7.6 B`."""
    if number < 1e6:
        return f"{number:,}"
    return f"{number / 1e6:.1f} M" if number < 1e9 else f"{number / 1e9:.1f} B"


def explain_device(device: torch.device, requested: str) -> str:
    """The device, and why it is no GPU."""
    if device.type != "cpu":
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        return f"{device}, {torch.cuda.get_device_name(device)}, {memory:.0f} GiB"
    if requested != "auto":
        return f"cpu, as model.device={requested} says"
    return f"cpu, because {explain_missing_gpu()}"


def check_run(config: RunConfig, *, models: Iterable[str]) -> None:
    """Raise if functions, models or data sets of a run cannot be used."""
    environment = drop_pending_tools(config.environment)
    load_functions(config.model_copy(update={"environment": environment}))
    check_models(config.model, models)
    for dataset in (*config.training_sets.values(), *config.eval_datasets.values()):
        if has_environment_tasks(config, dataset):
            load_run_tasks(config, dataset, name="check")
        else:
            check_rows(dataset.path, name=dataset.name, split=dataset.split)


def drop_pending_tools(section: EnvironmentSection) -> EnvironmentSection:
    """The section without tools whose settings name outputs of stages, which cannot be built before those have run."""
    tools = [
        each
        for each in section.tools
        if not any(read_reference(text) is not None for text in list_strings(each.settings))
    ]
    return section.model_copy(update={"tools": tuple(tools)})


def check_models(section: ModelSection, paths: Iterable[str]) -> None:
    if section.base_path is not None and read_reference(section.base_path) is not None:
        return
    for path in paths:
        if read_reference(path) is None:
            check_section(section.with_path(path))


def check_rows(path: str, *, name: str | None = None, split: str | None = "train") -> None:
    """Raise if the first row of a data set that is not the output of an earlier stage cannot be read."""
    if read_reference(path) is None:
        load_rows(path, name=name, split=split, num_rows=1)
