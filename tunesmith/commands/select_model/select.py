"""Selects the model with the highest mean reward for an agent.

Candidates are evaluated one after the other on the same tasks with the same seeds; weights are loaded once and released
before the next candidate. A failed run has no reward. A candidate with too many failures is not eligible, and rewards
are compared on the tasks that every eligible candidate was scored on, so a candidate gains nothing by failing on hard
tasks. Of candidates with the same mean the first is selected.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tunesmith.commands.candidates import (
    CURRENT_USAGE,
    Candidate,
    MeasuredModel,
    RunLimits,
    build_candidates,
    count_failures,
    counted_calls,
    find_problem,
    load_candidate,
    load_fixed_tasks,
    run_agent,
)
from tunesmith.commands.eval.compare import release_memory
from tunesmith.commands.eval.comparison import format_table
from tunesmith.commands.eval.sample_scores import Difference, Interval, compare_paired, compute_bootstrap_interval
from tunesmith.compat.agentscope_config import DatasetConfig
from tunesmith.compat.chat_models import agent_output, choose_chat_model
from tunesmith.errors import ConfigError, RolloutError
from tunesmith.rollout.failures import list_causes
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.signature import (
    check_selection_judge_function,
    check_workflow_function,
    is_sync_function,
    list_parameters,
)
from tunesmith.rollout.statistics import collect_reported
from tunesmith.rollout.user_code import ThreadCall
from tunesmith.runs.load_config import build_section
from tunesmith.types import JudgeOutput, JudgeType, Trajectory, WorkflowOutput, WorkflowType

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateScore:
    """One candidate on the tasks of the selection."""

    label: str
    model: Any
    """The candidate as it was passed."""
    reward: float | None
    """Mean over the compared tasks; None for a candidate that is not eligible."""
    interval: Interval | None
    """95 % bootstrap interval of the mean over tasks."""
    num_tasks: int
    num_scored: int
    """Tasks without a failure."""
    causes: tuple[str, ...]
    """The most frequent failures."""
    metrics: Mapping[str, float]
    """`<metric>_avg` of the workflow and the judge, of time and of tokens, over the scored tasks."""
    lead: Difference | None = None
    """Paired difference, best minus this candidate; None for the best and for one that is not eligible."""

    @property
    def num_failures(self) -> int:
        return self.num_tasks - self.num_scored


class ModelSelection(tuple[Any, dict[str, float]]):
    """The best model and its metrics, as a pair, with the scores of all candidates."""

    candidates: tuple[CandidateScore, ...]
    """In the order in which they were passed."""
    num_compared: int
    """Tasks that every eligible candidate was scored on; the rewards are means over them."""

    @classmethod
    def build(cls, best: CandidateScore, candidates: Sequence[CandidateScore], *, num_compared: int) -> Self:
        result = cls((best.model, dict(best.metrics)))
        result.candidates, result.num_compared = tuple(candidates), num_compared
        return result

    @property
    def model(self) -> Any:
        """The best model, as it was passed."""
        return self[0]

    @property
    def metrics(self) -> dict[str, float]:
        """`<metric>_avg` of the best model."""
        return self[1]

    def format_table(self) -> str:
        """A row per candidate, aligned for a terminal; Markdown."""
        head = ["model", "reward (95 % interval)", "behind the best (p)", "failed", "first cause"]
        return format_table(head, [self._format_row(each) for each in self.candidates])

    def _format_row(self, each: CandidateScore) -> list[str]:
        is_best = each.reward is not None and each.lead is None
        reward = "not eligible"
        if each.reward is not None and each.interval is not None:
            reward = f"{each.reward:.4g} ({each.interval[0]:.4g} to {each.interval[1]:.4g})"
        behind = "best" if is_best else ""
        if each.lead is not None:
            behind = f"{each.lead.mean:.4g} ({each.lead.p_value:.2g})"
        cause = each.causes[0] if each.causes else ""
        return [each.label, reward, behind, f"{each.num_failures} of {each.num_tasks}", cause]

    def to_pandas(self) -> DataFrame:
        """A row per candidate: label, reward, interval, tasks, failures, and its metrics."""
        from pandas import DataFrame  # half a second to import

        rows = [
            {"model": each.label, "reward": each.reward, "num_tasks": each.num_tasks, "num_failures": each.num_failures}
            | {"low": each.interval and each.interval[0], "high": each.interval and each.interval[1]}
            | dict(each.metrics)
            for each in self.candidates
        ]
        return DataFrame(rows)


logger = logging.getLogger(__name__)


async def select_model(
    *,
    workflow_func: WorkflowType,
    judge_func: JudgeType,
    train_dataset: DatasetConfig,
    candidate_models: Sequence[Any],
    max_threads: int = 2,
    timeout_s: float = 600.0,
    max_failure_rate: float = 0.2,
    chat_model: str = "auto",
    seed: int = 42,
) -> ModelSelection:
    """Return the candidate with the highest mean reward and its metrics, as a pair; `.candidates` has all scores.

    A candidate is a chat model, of AgentScope or any other class; a `TunerModelConfig`, which is loaded in this process
    or, with `base_url`, served elsewhere; or the path of a model or run. The judge receives
    `{"response": ..., "metrics": ...}`, where the metrics are the workflow's, `execution_time` in seconds, and
    `input_tokens`, `output_tokens` and `total_tokens` where they are known. `train_dataset.total_steps` limits the
    tasks. At most `max_threads` workflows run at once, each for at most `timeout_s` seconds.

    Failed runs are counted and have no reward. A candidate with a share of failures above `max_failure_rate` is not
    selected; rewards are means over the tasks that all others were scored on; the first of equal candidates is
    selected. Raises ConfigError, DataError or ModelError before any run, and RolloutError with the causes if too many
    runs of every candidate fail. `chat_model` is the class of models that are loaded, as in `rollout.chat_model`.
    """
    check_workflow_function(workflow_func, allows_sync=True)
    check_selection_judge_function(judge_func)
    if isinstance(candidate_models, str) or not isinstance(candidate_models, Sequence) or len(candidate_models) < 2:
        raise ConfigError("At least two candidate models must be provided.")
    limits = build_section(
        RunLimits,
        {"max_threads": max_threads, "timeout_s": timeout_s, "max_failure_rate": max_failure_rate, "seed": seed},
    )
    build_model = choose_chat_model(chat_model)
    candidates = build_candidates(candidate_models)
    tasks = load_fixed_tasks(train_dataset, knob="train_dataset")
    workflow, judge = measure_workflow(workflow_func), rename_task(judge_func)
    agent = Agent(workflow=workflow, judge=judge, timeout_s=timeout_s, logger=logger)
    runs: dict[str, list[Trajectory]] = {}
    with agent_output(is_shown=False):
        for candidate in candidates:
            loaded = load_candidate(candidate, build_model=build_model)
            shared = None if loaded.engine is not None else loaded.provider.open(seed=0, order=()).model
            with counted_calls(shared):
                model = MeasuredModel(loaded.provider)
                trajectories = await run_agent(tasks, agent=agent, model=model, engine=loaded.engine, limits=limits)
            del loaded, shared, model
            release_memory()
            runs[candidate.label] = trajectories
            if num_failed := count_failures(trajectories):
                causes = "\n  ".join(list_causes(run.failure for run in trajectories))
                logger.warning("%s: %d of %d runs failed:\n  %s", candidate.label, num_failed, len(tasks), causes)
    return choose_best(candidates, runs, limits)


class MeasuredResponse(dict[str, Any]):
    """What judges receive: AgentScope's dict of the response and its metrics, whose values are attributes too."""

    @property
    def response(self) -> Any:
        return self["response"]

    @property
    def metrics(self) -> dict[str, float]:
        metrics: dict[str, float] = self["metrics"]
        return metrics


def measure_workflow(workflow: WorkflowType) -> Callable[..., Any]:
    """A workflow whose response is AgentScope's composite for judges: the response, and its metrics with time and
    tokens."""

    @functools.wraps(workflow)
    async def measured(**arguments: Any) -> Any:
        started = time.perf_counter()
        call: Callable[..., Any] = workflow
        output = await (ThreadCall(call, arguments) if is_sync_function(workflow) else call(**arguments))
        if not isinstance(output, WorkflowOutput):
            return output
        metrics = dict(output.metrics or {}) | {"execution_time": time.perf_counter() - started}
        usage = CURRENT_USAGE.get()
        assert usage is not None, "a measured model was opened"
        if (tokens := usage.count_tokens()) is not None:
            names = ("input_tokens", "output_tokens", "total_tokens")
            metrics |= dict(zip(names, map(float, (*tokens, sum(tokens))), strict=True))
        return WorkflowOutput(response=MeasuredResponse(response=output.response, metrics=metrics), metrics=metrics)

    return measured


def rename_task(judge: JudgeType) -> Callable[..., Any]:
    """The judge with a parameter `task`; AgentScope's own judges call it `_task`."""
    if "_task" not in list_parameters(judge):
        return judge
    call: Callable[..., Any] = judge

    async def renamed(task: dict[str, Any], response: Any) -> JudgeOutput:
        output: JudgeOutput = await call(_task=task, response=response)
        return output

    return renamed


def choose_best(
    candidates: Sequence[Candidate], runs: Mapping[str, Sequence[Trajectory]], limits: RunLimits
) -> ModelSelection:
    """The eligible candidate with the highest mean reward, the first of several."""
    eligible = [each.label for each in candidates if find_problem(runs[each.label], limits) is None]
    if not eligible:
        raise RolloutError(
            f"no model can be selected: with each of them more runs failed than max_failure_rate="
            f"{limits.max_failure_rate:g} allows:\n{list_all_causes(runs)}"
        )
    rewards = {label: [each.reward for each in runs[label]] for label in eligible}
    compared = [i for i in range(len(rewards[eligible[0]])) if all(rewards[label][i] is not None for label in eligible)]
    if not compared:
        raise RolloutError(
            f"no task was scored with each of {', '.join(eligible)}, so they cannot be compared; lower "
            "max_failure_rate, or correct what fails:\n" + list_all_causes(runs)
        )
    values = {label: [float(rewards[label][i] or 0.0) for i in compared] for label in eligible}
    means = {label: math.fsum(each) / len(each) for label, each in values.items()}
    best = max(eligible, key=means.__getitem__)
    scores = {each.label: score_candidate(each, runs[each.label], values, best, limits.seed) for each in candidates}
    selection = ModelSelection.build(scores[best], list(scores.values()), num_compared=len(compared))
    logger.info("Selected %s:\n%s", best, selection.format_table())
    return selection


def score_candidate(
    candidate: Candidate,
    trajectories: Sequence[Trajectory],
    values: Mapping[str, Sequence[float]],
    best: str,
    seed: int,
) -> CandidateScore:
    """`values` has the rewards of eligible candidates on the compared tasks."""
    label, own = candidate.label, values.get(candidate.label)
    lead: Difference | None = None
    if own is not None and label != best:
        lead = compare_paired(own, values[best], seed=seed)
    scored = [each for each in trajectories if each.failure is None]
    return CandidateScore(
        label=label,
        model=candidate.given,
        reward=None if own is None else math.fsum(own) / len(own),
        interval=None if own is None else compute_bootstrap_interval(own, seed=seed),
        num_tasks=len(trajectories),
        num_scored=len(scored),
        causes=tuple(list_causes(run.failure for run in trajectories)),
        metrics={f"{name}_avg": statistics.fmean(values) for name, values in collect_reported(scored).items()},
        lead=lead,
    )


def list_all_causes(runs: Mapping[str, Sequence[Trajectory]]) -> str:
    failures = {label: [run.failure for run in each] for label, each in runs.items()}
    return "\n".join(
        f"  {label}: {len(each) - each.count(None)} of {len(each)} failed: {'; '.join(list_causes(each))}"
        for label, each in failures.items()
    )
