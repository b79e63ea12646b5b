"""Models and prompts under comparison: loading them, running the agent on tasks with them, and what the runs used.

A workflow receives its model from any description: a chat model, a server's model, or weights, which are loaded into an
engine of their own, with sessions that record tokens. A chat model of the caller is used as it is. The agent runs once
on each task; what failed is counted, never scored.

Time and tokens are those of one run of a workflow. Of a model in this process, the recorded turns are counted. Of other
chat models, the calls of the model object: its class is replaced by a subclass while it is measured, so that the object
stays the caller's. Replies of AgentScope (`input_tokens`, `output_tokens`) and of OpenAI's client (`prompt_tokens`,
`completion_tokens`) state their usage. Tokens are unknown, not 0, if a reply states none or if the workflow calls the
model in another way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from tunesmith.commands.eval.compare import find_model
from tunesmith.compat.agentscope_config import (
    DatasetConfig,
    TunerModelConfig,
    translate_dataset,
    translate_model_fields,
)
from tunesmith.config import AuxiliaryModelSection, DatasetSection, EngineSection, ModelSection, Section
from tunesmith.errors import ConfigError
from tunesmith.model.load import check_section
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.dispatcher import build_evaluator
from tunesmith.rollout.group import GroupRequest
from tunesmith.rollout.recording.recorder import Session
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import BoundModel, ExternalModel, ModelProvider
from tunesmith.rollout.statistics import describe_failures
from tunesmith.runs.policy import BuildModel, LoadedModel, check_auxiliary, load_auxiliary, load_policy
from tunesmith.tasks.load import load_tasks
from tunesmith.types import Engine, Sampling, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model by its label."""

    label: str
    given: Any
    """The object that the caller passed."""
    source: ModelSection | AuxiliaryModelSection | Any
    """Settings of local weights, of a model on a server, or a chat model."""


def load_candidate(candidate: Candidate, *, build_model: BuildModel) -> LoadedModel:
    """Load the weights, or connect to the server; a chat model needs neither."""
    source = candidate.source
    if isinstance(source, ModelSection):
        policy = load_policy(source, EngineSection(), build_model=build_model)
        return LoadedModel(provider=policy.service, engine=policy.engine)
    if isinstance(source, AuxiliaryModelSection):
        return load_auxiliary(candidate.label, source, EngineSection(), device="auto", build_model=build_model)
    return LoadedModel(provider=ExternalModel(source))


def build_candidate(given: Any, *, label: str) -> Candidate:
    """A model from a chat model, a TunerModelConfig or a path; raises ConfigError or ModelError for one that cannot be
    loaded, before any weights are read."""
    source = given
    if isinstance(given, str | Path):
        source = ModelSection(path=find_model(str(given)))
    elif isinstance(given, TunerModelConfig):
        source = build_section(given, label=label)
    if isinstance(source, ModelSection):
        check_section(source)
    elif isinstance(source, AuxiliaryModelSection):
        check_auxiliary(label, source)
    elif not callable(source):
        raise ConfigError(f"{label} must be a chat model, a TunerModelConfig, or the path of a model, got {source!r}")
    return Candidate(label=label, given=given, source=source)


def build_section(model: TunerModelConfig, *, label: str) -> ModelSection | AuxiliaryModelSection:
    """Settings of a model in this process, or with `base_url` of one on a server."""
    if model.tinker_config is not None:
        raise ConfigError(f"{label}: tinker_config has no effect, because the model is not trained; remove it")
    for key in ("inference_engine_num", "tensor_parallel_size"):
        if (number := getattr(model, key)) != 1:
            raise ConfigError(
                f"{label}: {key}={number} is not supported: a model in this process has one engine on one device; set 1"
            )
    fields = translate_model_fields(model)
    if model.base_url is not None:
        return AuxiliaryModelSection(**fields)
    if fields.pop("api_key_env", None) is not None:
        raise ConfigError(f"{label}: api_key_env has no effect without base_url: the model runs in this process")
    fields.pop("base_url", None)
    return ModelSection(**fields | {"path": find_model(model.model_path)})


def build_candidates(given: Sequence[Any]) -> list[Candidate]:
    """Each model under its name; of models with one name, later ones are numbered."""
    labels: list[str] = []
    for number, each in enumerate(given):
        name = find_name(each) or f"candidate_models[{number}]"
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


class RunLimits(Section):
    """Limits and seed of all runs of one comparison."""

    max_threads: int = Field(ge=1)
    """Workflows that run at once."""
    timeout_s: float = Field(gt=0)
    """Time limit of a workflow and its judge."""
    max_failure_rate: float = Field(ge=0, lt=1)
    """Share of failed runs above which a candidate cannot be chosen."""
    seed: int = Field(ge=0)
    """Seed of local models and of the bootstrap."""


async def run_agent(
    tasks: Sequence[Task], *, agent: Agent, model: ModelProvider, engine: Engine | None, limits: RunLimits
) -> list[Trajectory]:
    """One trajectory per task, in their order; a task has the same seed in every call. `engine`: the model's, if it is
    in this process."""
    requests = [GroupRequest(number=task.index, task=task, size=1, seed=(limits.seed, 0, task.index)) for task in tasks]
    actors = Actors(engine=engine, model=model, agent=agent, max_concurrency=limits.max_threads)
    async with build_evaluator(actors) as dispatcher:
        groups = await dispatcher.evaluate(requests)
    return [group.trajectories[0] for group in groups]


def count_failures(trajectories: Sequence[Trajectory]) -> int:
    return sum(each.failure is not None for each in trajectories)


def find_problem(trajectories: Sequence[Trajectory], limits: RunLimits) -> str | None:
    """What is wrong if more runs failed than the limits allow; None if not."""
    return describe_failures([each.failure for each in trajectories], limits.max_failure_rate)


FIELDS = (("input_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens"))


@dataclass(slots=True, kw_only=True)
class RolloutUsage:
    """What one run of a workflow used."""

    session: Session | None
    """The recorded calls, if the model is in this process."""
    num_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    is_complete: bool = True
    """Whether every call stated its usage."""

    def add(self, usage: Any) -> None:
        """Add the usage that a reply states; None: it states none."""
        self.num_calls += 1
        for input_name, output_name in FIELDS:
            given = read_field(usage, input_name), read_field(usage, output_name)
            if all(isinstance(each, int) for each in given):
                self.input_tokens += given[0]
                self.output_tokens += given[1]
                return
        self.is_complete = False

    def count_tokens(self) -> tuple[int, int] | None:
        """Input and output tokens; None if they are unknown."""
        if self.session is not None:
            return self.session.count_tokens()
        return (self.input_tokens, self.output_tokens) if self.num_calls and self.is_complete else None


def read_field(holder: Any, name: str) -> Any:
    """An attribute, or None; objects of AgentScope raise KeyError for one that they do not have."""
    try:
        return getattr(holder, name, None)
    except KeyError:
        return None


CURRENT_USAGE: ContextVar[RolloutUsage | None] = ContextVar("tunesmith_usage", default=None)
"""That of the workflow that runs in this context."""


class MeasuredModel:
    """A provider whose rollouts have a `RolloutUsage` of their own, in the context of the rollout."""

    def __init__(self, provider: ModelProvider) -> None:
        self._provider = provider

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        bound = self._provider.open(seed=seed, order=order, sampling=sampling)
        CURRENT_USAGE.set(RolloutUsage(session=bound.session if isinstance(bound.session, Session) else None))
        return bound


@contextlib.contextmanager
def counted_calls(model: Any) -> Iterator[None]:
    """Within: calls of a chat model add to the usage of the context they are made in."""
    before: Any = type(model)
    with contextlib.suppress(TypeError):  # a function, or a class with slots: its tokens stay unknown
        model.__class__ = _count_calls(before)
    try:
        yield
    finally:
        if type(model) is not before:
            model.__class__ = before


@functools.cache
def _count_calls(model_class: Any) -> Any:
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = await super(counted, self).__call__(*args, **kwargs)
        usage = CURRENT_USAGE.get()
        if usage is None:
            return reply
        if isinstance(reply, AsyncIterator):
            return _count_stream(reply, usage)
        usage.add(read_field(reply, "usage"))
        return reply

    names = {"__call__": call, "__module__": model_class.__module__, "__slots__": ()}
    counted: Any = type(model_class.__name__, (model_class,), names)
    return counted


async def _count_stream(chunks: AsyncIterator[Any], usage: RolloutUsage) -> AsyncIterator[Any]:
    """The chunks; the last one that states a usage has that of the whole reply."""
    stated = None
    try:
        async for chunk in chunks:
            stated = read_field(chunk, "usage") or stated
            yield chunk
    finally:
        usage.add(stated)
