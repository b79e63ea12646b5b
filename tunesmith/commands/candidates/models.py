"""The model that a workflow receives, from any of its descriptions: a chat model, a server's model, or weights.

Weights are loaded into an engine of their own, with sessions that record tokens. A chat model of the caller is used as
it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tunesmith.config import AuxiliaryModelSection, EngineSection, ModelSection
from tunesmith.errors import ConfigError
from tunesmith.rollout.service import ExternalModel, ModelProvider
from tunesmith.runs.policy import BuildModel, check_policy, load_auxiliary, load_policy
from tunesmith.types import Engine


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
        """Within: the engine samples, from an empty prefix cache."""
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
