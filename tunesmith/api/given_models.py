"""Models and data sets as `tune_prompt` and `select_model` receive them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.commands.candidates.models import Candidate
from tunesmith.commands.eval.compare import find_model
from tunesmith.compat.agentscope_config import (
    DatasetConfig,
    TunerModelConfig,
    translate_dataset,
    translate_model_fields,
)
from tunesmith.config import AuxiliaryModelSection, DatasetSection, ModelSection
from tunesmith.errors import ConfigError
from tunesmith.tasks.load import load_tasks
from tunesmith.types import Task

ONE_ENGINE = "a model in this process has one engine"


def build_candidate(given: Any, *, label: str) -> Candidate:
    """A model from a chat model, a TunerModelConfig or a path."""
    source = given
    if isinstance(given, str | Path):
        source = ModelSection(path=find_model(str(given)))
    elif isinstance(given, TunerModelConfig):
        source = build_section(given, label=label)
    return Candidate(label=label, given=given, source=source)


def build_section(model: TunerModelConfig, *, label: str) -> ModelSection | AuxiliaryModelSection:
    """Settings of a model in this process, or with `base_url` of one on a server."""
    if model.tinker_config is not None:
        raise ConfigError(f"{label}: tinker_config has no effect, because the model is not trained; remove it")
    if model.inference_engine_num != 1:
        raise ConfigError(
            f"{label}: inference_engine_num={model.inference_engine_num} is not supported: {ONE_ENGINE}; set 1"
        )
    fields = translate_model_fields(model)
    if model.base_url is not None:
        return AuxiliaryModelSection(**fields)
    if fields.pop("api_key_env", None) is not None:
        raise ConfigError(f"{label}: api_key_env has no effect without base_url: the model runs in this process")
    fields.pop("base_url", None)
    return ModelSection(**fields | {"path": find_model(model.model_path)})


def build_candidates(given: Sequence[Any], *, knob: str) -> list[Candidate]:
    """Each model under its name; of models with one name, later ones are numbered."""
    labels: list[str] = []
    for number, each in enumerate(given):
        name = find_name(each) or f"{knob}[{number}]"
        labels.append(name if name not in labels else f"{name} #{number + 1}")
    return [build_candidate(each, label=label) for each, label in zip(given, labels, strict=True)]


def find_name(model: Any) -> str | None:
    if isinstance(model, str | Path):
        return str(model)
    name = getattr(model, "model_path" if isinstance(model, TunerModelConfig) else "model_name", None)
    return name if isinstance(name, str) else None


def load_fixed_tasks(dataset: DatasetConfig, *, knob: str) -> list[Task]:
    """The rows of a data set that are all run: the first `total_steps`, or all."""
    if not isinstance(dataset, DatasetConfig):
        raise ConfigError(f"{knob} must be a DatasetConfig, got {type(dataset).__name__}")
    for name in ("total_epochs", "task_selector", "weight"):
        if getattr(dataset, name) != DatasetConfig.model_fields[name].default:
            raise ConfigError(f"{knob}.{name} has no effect: every task is run once; total_steps limits their number")
    section = DatasetSection(**translate_dataset(dataset))
    return load_tasks(section, name=knob)[: dataset.total_steps]
