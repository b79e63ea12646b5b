"""`select_model`: the best of several models for an agent, with AgentScope's arguments and result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.api.given_models import build_candidates, load_fixed_tasks
from tunesmith.commands.candidates.runs import RunLimits
from tunesmith.commands.select_model.result import ModelSelection
from tunesmith.commands.select_model.select import run_selection
from tunesmith.compat.agentscope_config import DatasetConfig
from tunesmith.compat.agentscope_output import agent_output
from tunesmith.compat.chat_models import choose_chat_model_class
from tunesmith.config.section import MAX_INTEGER
from tunesmith.errors import ConfigError
from tunesmith.rollout.signature import check_selection_judge_function, check_workflow_function
from tunesmith.types import JudgeType, WorkflowType


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
    if len(candidate_models) < 2:
        raise ConfigError("At least two candidate models must be provided.")
    check_limits(max_threads=max_threads, timeout_s=timeout_s, max_failure_rate=max_failure_rate, seed=seed)
    build_model = choose_chat_model_class(chat_model)
    candidates = build_candidates(candidate_models, knob="candidate_models")
    tasks = load_fixed_tasks(train_dataset, knob="train_dataset")
    limits = RunLimits(max_concurrency=max_threads, timeout_s=timeout_s, max_failure_rate=max_failure_rate, seed=seed)
    with agent_output(is_shown=False):
        return await run_selection(
            candidates,
            tasks,
            workflow=workflow_func,
            judge=judge_func,
            limits=limits,
            build_model=build_model,
        )


def check_limits(*, max_threads: int, timeout_s: float, max_failure_rate: float, seed: int) -> None:
    """Raise a ConfigError that names the first argument out of its range."""
    allowed = {
        f"max_threads={max_threads}": (isinstance(max_threads, int) and max_threads >= 1, "an integer of at least 1"),
        f"timeout_s={timeout_s}": (timeout_s > 0, "a number of seconds above 0"),
        f"max_failure_rate={max_failure_rate}": (0 <= max_failure_rate < 1, "at least 0 and below 1"),
        f"seed={seed}": (isinstance(seed, int) and 0 <= seed <= MAX_INTEGER, "an integer of at least 0"),
    }
    for given, (is_allowed, expected) in allowed.items():
        if not is_allowed:
            raise ConfigError(f"{given} must be {expected}")
