"""`tune_prompt`: the best system prompt for an agent, with AgentScope's arguments and result."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tunesmith.api.given_models import build_candidate, load_fixed_tasks
from tunesmith.commands.candidates.models import Candidate
from tunesmith.commands.candidates.runs import RunLimits
from tunesmith.commands.tune_prompt.result import PromptTuneResult
from tunesmith.commands.tune_prompt.settings import LiteLlmModel, PromptTuning
from tunesmith.commands.tune_prompt.tune import check_dspy, check_tasks, run_prompt_tuning
from tunesmith.compat.agentscope_config import DatasetConfig
from tunesmith.compat.agentscope_output import agent_output
from tunesmith.compat.agentscope_prompt_config import PromptTuneConfig
from tunesmith.compat.chat_models import choose_chat_model_class
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.errors import ConfigError
from tunesmith.rollout.signature import check_judge_function, check_prompt_workflow_function, list_parameters
from tunesmith.types import JudgeType


def tune_prompt(
    *,
    workflow: Callable[..., Any],
    init_system_prompt: str,
    judge_func: JudgeType,
    train_dataset: DatasetConfig,
    eval_dataset: DatasetConfig | None = None,
    config: PromptTuneConfig | None = None,
    model: Any = None,
    prompt_model: Any = None,
    chat_model: str = "auto",
) -> PromptTuneResult:
    """Return the best system prompt that DSPy's MIPROv2 finds, and its metrics, as a pair.

    The workflow is `async (task, system_prompt)` with a chat model of its own, or `async (task, system_prompt, model)`,
    which receives `model`: a chat model, a `TunerModelConfig` (loaded in this process or, with `base_url`, served
    elsewhere), or the path of a model or run. `prompt_model`, one of these too, proposes the prompts; None is
    `config.lm_model_name` if it is set or there is no `model`, and `model` otherwise.

    Prompts are evaluated on four fifths of `train_dataset`; `eval_dataset` then compares the result with the initial
    prompt. Failed runs are counted and have no reward. The result also has every evaluated prompt (`.candidates`), the
    comparison (`.held_out`), and whether the prompt is better (`.is_improved`). Needs the extra `prompt`. Raises
    ConfigError, DataError or ModelError before any run, and RolloutError if too many runs of the initial prompt fail.
    May be called while an event loop runs.
    """
    config = config or PromptTuneConfig()
    check_prompt_workflow_function(workflow)
    check_judge_function(judge_func)
    check_dspy()
    if not init_system_prompt.strip():
        raise ConfigError("init_system_prompt is empty: give the prompt that the search starts from")
    has_model = "model" in list_parameters(workflow)
    if has_model != (model is not None):
        raise ConfigError(
            "the workflow has a parameter `model`: give tune_prompt() a model"
            if has_model
            else "model has no effect: the workflow has no parameter `model`"
        )
    student = None if model is None else build_candidate(model, label="model")
    proposer = choose_proposer(config, student, prompt_model)
    tasks = load_fixed_tasks(train_dataset, knob="train_dataset")
    check_tasks(tasks, knob="train_dataset")
    held_out = None if eval_dataset is None else load_fixed_tasks(eval_dataset, knob="eval_dataset")
    with agent_output(is_shown=False):
        return run_outside_of_loops(
            lambda: run_lockstep(
                run_prompt_tuning(
                    describe_tuning(config, init_system_prompt),
                    tasks,
                    held_out,
                    workflow=workflow,
                    judge=judge_func,
                    model=student,
                    proposer=proposer,
                    build_model=choose_chat_model_class(chat_model),
                )
            )
        )


def choose_proposer(config: PromptTuneConfig, student: Candidate | None, prompt_model: Any) -> Candidate | LiteLlmModel:
    """The model that proposes prompts."""
    if prompt_model is not None:
        is_same = student is not None and prompt_model is student.given
        return student if is_same and student else build_candidate(prompt_model, label="prompt_model")
    if student is not None and "lm_model_name" not in config.model_fields_set:
        return student
    api_key = None
    if config.lm_api_key_env is not None:
        api_key = os.environ.get(config.lm_api_key_env)
        if api_key is None:
            raise ConfigError(f"lm_api_key_env: the environment variable {config.lm_api_key_env} is not set")
    return LiteLlmModel(name=config.lm_model_name, base_url=config.lm_base_url, api_key=api_key)


def describe_tuning(config: PromptTuneConfig, initial_prompt: str) -> PromptTuning:
    return PromptTuning(
        initial_prompt=initial_prompt,
        level=config.optimization_level,
        num_candidates=config.num_candidates,
        num_trials=config.num_trials,
        limits=RunLimits(
            max_concurrency=config.eval_num_threads,
            timeout_s=config.timeout_s,
            max_failure_rate=config.max_failure_rate,
            seed=config.seed,
        ),
        is_compared=config.compare_performance,
        num_shown_tasks=config.eval_display_table,
        has_progress=config.eval_display_progress,
    )
