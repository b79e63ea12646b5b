"""Validate a training run and prepare its data before models load: its tasks, and what selects them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from tunesmith.algorithms.algorithm import Algorithm, load_algorithm
from tunesmith.commands.sft.conversations import ConversationReader
from tunesmith.commands.sft.plan import load_conversation_rows
from tunesmith.commands.tune.callbacks import Callbacks, load_callbacks
from tunesmith.commands.tune.learning_check import check_sampling_is_random
from tunesmith.config import (
    AlgorithmSection,
    ConversationDataSection,
    DatasetSection,
    ModelSection,
    ReplaySection,
    RolloutSection,
    RunConfig,
    SelectorSection,
)
from tunesmith.errors import ConfigError, errors_of
from tunesmith.experience.replay import ExpertFeed, ReplayBuffer
from tunesmith.experience.table import BoundOperator, build_operators
from tunesmith.model.load import load_section_tokenizer
from tunesmith.monitor.tracker import check_trackers
from tunesmith.runs.extra_models import check_extra_models, check_sharded_models
from tunesmith.runs.load_function import CustomComponents, load_component
from tunesmith.runs.policy import check_auxiliary, check_engine, check_trained_model
from tunesmith.runs.tasks import load_run_tasks
from tunesmith.runs.workspace import describe_rows, digest_rows
from tunesmith.tasks.contamination import count_shared_tasks
from tunesmith.tasks.selector import Mixture, Selector, TaskFeed, build_sequential
from tunesmith.tasks.table import (
    apply_task_operators,
    build_own_selector,
    build_selector,
    check_selector,
    compute_weights,
)
from tunesmith.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything a run needs that does not depend on weights."""

    algorithm: Algorithm
    callbacks: Callbacks
    feed: TaskFeed
    task_counts: dict[str, float]
    """Metrics of operators on tasks."""
    operators: list[BoundOperator]
    replay: ReplayBuffer
    experts: ExpertFeed | None
    """Expert demonstrations mixed into each update."""
    eval_tasks: dict[str, list[Task]]
    sources: dict[str, str | None]
    """Digest of the rows of each data set, by its key in the run file; a resumed run must have the same."""
    total_steps: int


def build_plan(config: RunConfig, custom: CustomComponents = CustomComponents()) -> RunPlan:
    """Run every check that needs no weights, and read the data."""
    algorithm = load_algorithm(config.algorithm, custom.load)
    if algorithm.is_supervised:
        raise ConfigError(
            f"algorithm.algorithm_type={algorithm.name!r} does not train on rewards: choose another, or use "
            "`tunesmith sft` for conversations and `tunesmith prefer` for preferences"
        )
    if config.is_online:
        check_online(config, algorithm)
    count_refilled(config.experience.refill_budget, batch_size=config.algorithm.batch_size)
    check_rollouts(config.rollout, config.experience.replay, algorithm)
    check_sampling_is_random(config.model, algorithm)
    with errors_of("experience.operators"):
        operators = build_operators(
            config.experience, load=partial(load_component, knob="experience.operators"), own=custom.operators
        )
    sources: dict[str, str | None] = {}

    def load_set(section: DatasetSection, *, name: str, knob: str) -> list[Task]:
        with errors_of(knob):
            tasks = load_run_tasks(config, section, name=name)
        sources[knob] = digest_rows(describe_rows(tasks))  # before operators, which may call a model
        return tasks

    counted: dict[str, float] = {}
    if config.is_online:  # tasks without content, one for each group of a step: each rollout is a live conversation
        tasks = [Task(task_id=f"live/{index}", index=index, row={}) for index in range(config.algorithm.batch_size)]
        feed = TaskFeed(tasks, build_sequential(np.empty((len(tasks), 0)), seed=0))
    else:
        feed, counted = build_task_feed(config, custom, load_set)
    eval_tasks = {
        name: load_set(dataset, name=name, knob=f"eval_datasets.{name}")[: config.evaluation.max_tasks]
        for name, dataset in config.eval_datasets.items()
    }
    check_trained_model(config.model, config.trainer)
    check_engine(config.engine, config.model)
    check_extra_models(algorithm, config.algorithm, config.model)
    if config.cluster.has_sharded_weights:
        check_sharded_models(algorithm, config.algorithm, config.model)
    check_trackers(config.monitor.trackers)
    for name, section in config.auxiliary_models.items():
        check_auxiliary(f"auxiliary_models.{name}", section)
    experts = None
    if config.algorithm.expert is not None:
        experts, sources["algorithm.expert"] = load_expert_feed(config.algorithm, config.model, config.seed)
    return RunPlan(
        algorithm=algorithm,
        callbacks=load_callbacks(config.callbacks, custom),
        feed=feed,
        task_counts=counted,
        operators=operators,
        replay=ReplayBuffer(config.experience.replay, seed=config.seed),
        experts=experts,
        eval_tasks=eval_tasks,
        sources=sources,
        total_steps=config.total_steps
        or compute_total_steps(config.total_epochs, num_tasks=len(feed.tasks), batch_size=config.algorithm.batch_size),
    )


def check_online(config: RunConfig, algorithm: Algorithm) -> None:
    """Raise if the run needs tasks, which live traffic has not."""
    reasons = {
        "train_dataset": (bool(config.training_sets), "remove it: conversations take the place of tasks"),
        "eval_datasets": (bool(config.eval_datasets), "remove it, and evaluate checkpoints with `tunesmith eval`"),
        "judge": (config.judge is not None, "remove it: clients post the reward"),
        "algorithm.group_size": (config.algorithm.group_size != 1, "set it to 1: each conversation is its own group"),
        "total_steps": (config.total_steps is None, "set it to the number of steps after which the run ends"),
        "algorithm.algorithm_type": ("baselines" in algorithm.needs, "choose one that needs no baseline rollouts"),
    }
    for knob, (is_wrong, advice) in reasons.items():
        if is_wrong:
            raise ConfigError(f"serve.mode=online does not work with this {knob}: {advice}")


def count_refilled(budget: float, *, batch_size: int) -> int:
    """Tasks that a step may run, refills included; raises if the budget allows none beyond the batch."""
    num_tasks = math.floor(round(budget * batch_size, 6))  # 1.15 of 20 are 23
    if budget > 1 and num_tasks == batch_size:
        enough = math.ceil(round(1e4 * (1 + 1 / batch_size), 6)) / 1e4
        raise ConfigError(
            f"experience.refill_budget={budget:g} allows no task beyond a batch of {batch_size}: raise it to "
            f"{enough:.5g} or more"
        )
    return num_tasks


def check_rollouts(rollout: RolloutSection, replay: ReplaySection, algorithm: Algorithm) -> None:
    """Refuse rollouts that the algorithm is not defined for: of older weights, or with hard credit."""
    branching = rollout.branching
    older = {"rollout.max_staleness": rollout.max_staleness, "experience.replay.num_groups": replay.num_groups}
    for key, value in older.items():
        if value and algorithm.entry.needs_current_weights:
            raise ConfigError(
                f"{key}={value} does not work with algorithm.algorithm_type={algorithm.name!r}: it is defined for "
                "tokens of the current weights only; choose another, such as multi_step_grpo"
            )
    knob = algorithm.find_sequence_knob()
    if branching is not None and branching.credit == "hard" and knob is not None:
        raise ConfigError(
            f"rollout.branching.credit=hard trains a shared turn in one rollout only, and {knob} needs all tokens of "
            "each rollout: set credit=soft, or choose what is computed token by token, such as grpo"
        )


def compute_total_steps(total_epochs: int, *, num_tasks: int, batch_size: int) -> int:
    """The number of whole batches in `total_epochs` passes over the tasks, at least 1."""
    return max(1, total_epochs * num_tasks // batch_size)


def describe_repetition(*, num_tasks: int, batch_size: int) -> str | None:
    """A console note if there are fewer tasks than a batch holds, so that a step repeats tasks."""
    if num_tasks >= batch_size:
        return None
    return (
        f"{num_tasks} training tasks are fewer than algorithm.batch_size={batch_size}: each step repeats tasks to fill "
        "its batch, each repetition as a separate group"
    )


def describe_overlaps(tasks: Sequence[Task], eval_tasks: Mapping[str, Sequence[Task]]) -> list[str]:
    """A console note for each held-out set that has training tasks."""
    counts = {name: count_shared_tasks(tasks, held_out) for name, held_out in eval_tasks.items()}
    return [
        f"eval_datasets.{name}: {count} of {len(eval_tasks[name])} tasks are training tasks too, so its rewards do not "
        "measure held-out tasks"
        for name, count in counts.items()
        if count
    ]


ROUNDING = 1e-9
"""Tolerance for floating-point error before rounding a count up."""


def load_expert_feed(algorithm: AlgorithmSection, model: ModelSection, seed: int) -> tuple[ExpertFeed, str | None]:
    """Read the demonstrations that are mixed with the rollouts of each step; also return the digest of their rows."""
    section = algorithm.expert
    assert section is not None
    rows = load_conversation_rows(ConversationDataSection(path=section.path, name=section.name, split=section.split))
    reader = ConversationReader(
        load_section_tokenizer(model),
        enable_thinking=model.enable_thinking,
        split_special_tokens=model.split_special_tokens,
    )
    samples = [replace(sample, is_expert=True) for sample in reader.read(rows, max_model_len=model.max_model_len)]
    demonstrations = [list(row_samples) for _, row_samples in groupby(samples, key=lambda sample: sample.group_index)]
    num_rollouts = algorithm.batch_size * algorithm.group_size
    num_per_step = math.ceil(section.ratio / (1 - section.ratio) * num_rollouts - ROUNDING)
    return ExpertFeed(demonstrations, num_per_step=num_per_step, seed=seed), digest_rows(rows)


def build_task_feed(
    config: RunConfig, custom: CustomComponents, load_set: Callable[..., list[Task]]
) -> tuple[TaskFeed, dict[str, float]]:
    """Read the training sets, apply their operators and build their selectors; also return the operators' metrics.

    `load_set(section, name=..., knob=...)` reads one.
    """
    sets, seed = config.training_sets, config.seed
    if not sets:
        raise ConfigError("train_dataset is missing: pass a DatasetConfig to tune(), or set train_dataset.path")
    tasks_of: dict[str, list[Task]] = {}
    selectors: dict[str, Selector] = {}
    metrics: dict[str, float] = {}
    for name, section in sets.items():
        knob, given = config.training_knobs[name], custom.selectors.get(name)
        tasks, load = load_set(section, name=name, knob=knob), partial(load_component, knob=f"{knob}.operators")
        with errors_of(f"{knob}.operators"):
            tasks, counted = apply_task_operators(tasks, section.operators, load=load)
        metrics |= counted if len(sets) == 1 else {f"{metric}/{name}": value for metric, value in counted.items()}
        with errors_of(f"{knob}.task_selector"):
            selectors[name] = build_set_selector(
                section.task_selector, tasks, given, seed=seed, knob=f"{knob}.task_selector"
            )
        tasks_of[name] = tasks
    tasks = [task for each in tasks_of.values() for task in each]
    selector = next(iter(selectors.values()))
    if len(sets) > 1:
        sizes = {name: len(each) for name, each in tasks_of.items()}
        weights = compute_weights({name: section.weight for name, section in sets.items()})
        selector = Mixture(selectors, sizes, weights=weights, seed=seed)
    return TaskFeed(tasks, selector), metrics


def build_set_selector(
    section: SelectorSection, tasks: Sequence[Task], given: Any, *, seed: int, knob: str
) -> Selector:
    """The selector of one training set: the caller's object `given`, or the one in the config."""
    if given is None:
        return build_selector(section, tasks, seed=seed, load=partial(load_component, knob=knob))
    if hasattr(given, "select") and not isinstance(given, type):
        return check_selector(given, name=section.selector_type)
    return build_own_selector(given, tasks, section=section, seed=seed if section.seed is None else section.seed)
