"""The model that a workflow receives, from any of its descriptions: a chat model, a server's model, or weights.

Weights are loaded into an engine of their own, with sessions that record tokens. A chat model of the caller is used as
it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.commands.eval.compare import find_model
from tunesmith.compat.agentscope_config import (
    DatasetConfig,
    TunerModelConfig,
    translate_dataset,
    translate_model_fields,
)
from tunesmith.config import AuxiliaryModelSection, DatasetSection, EngineSection, ModelSection
from tunesmith.errors import ConfigError
from tunesmith.rollout.service import ExternalModel, ModelProvider
from tunesmith.runs.policy import BuildModel, check_policy, load_auxiliary, load_policy
from tunesmith.tasks.load import load_tasks
from tunesmith.types import Engine, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model by its label."""

    label: str
    given: Any
    """The object that the caller passed."""
    source: ModelSection | AuxiliaryModelSection | Any
    """Settings of local weights, of a model on a server, or a chat model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that workflows can call; `engine` is None if it is outside of this process."""

    provider: ModelProvider
    engine: Engine | None = None

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Within: the engine samples, from an empty prefix cache. Rollouts see to that themselves."""
        if self.engine is None:
            yield
            return
        self.engine.resume(0)
        try:
            yield
        finally:
            self.engine.pause()

    def find_chat_model(self) -> Any:
        """The chat model that all rollouts share; None if each has its own."""
        return None if self.engine is not None else self.provider.open(seed=0, order=()).model


def check_candidate(candidate: Candidate) -> None:
    """Raise ConfigError or ModelError for a model that cannot be loaded, before any weights are read."""
    source = candidate.source
    if isinstance(source, ModelSection):
        check_policy(source)
    elif isinstance(source, AuxiliaryModelSection):
        if source.api_key_env is not None and source.api_key_env not in os.environ:
            raise ConfigError(
                f"{candidate.label}: api_key_env: the environment variable {source.api_key_env} is not set"
            )
    elif not callable(source):
        raise ConfigError(
            f"{candidate.label} must be a chat model, a TunerModelConfig, or the path of a model, got {source!r}"
        )


def load_candidate(candidate: Candidate, *, build_model: BuildModel) -> LoadedModel:
    """Load the weights, or connect to the server; a chat model needs neither."""
    source = candidate.source
    if isinstance(source, ModelSection):
        policy = load_policy(source, EngineSection(), build_model=build_model)
        return LoadedModel(provider=policy.service, engine=policy.engine)
    if isinstance(source, AuxiliaryModelSection):
        loaded = load_auxiliary(source, EngineSection(), device="auto", build_model=build_model)
        return LoadedModel(provider=loaded.source, engine=loaded.engine)
    return LoadedModel(provider=ExternalModel(source))


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
