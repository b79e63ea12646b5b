"""Tunes a system prompt: the optimizer proposes and evaluates prompts, then both prompts run on held-out tasks."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tunesmith.arguments import read_api_key
from tunesmith.commands.candidates import (
    Candidate,
    RunLimits,
    build_candidate,
    load_candidate,
    load_fixed_tasks,
)
from tunesmith.commands.eval.comparison import format_table
from tunesmith.commands.eval.sample_scores import compare_known
from tunesmith.commands.tune_prompt.prompt_runs import HeldOutScores, PromptRuns, PromptTuneResult, Teacher, summarize
from tunesmith.compat.agentscope_config import DatasetConfig, PromptTuneConfig
from tunesmith.compat.chat_models import agent_output, choose_chat_model
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.errors import ConfigError, DataError, shorten
from tunesmith.monitor.console import ConsoleProgress
from tunesmith.rollout.service import ExternalModel
from tunesmith.rollout.signature import check_judge_function, check_prompt_workflow_function, list_parameters
from tunesmith.runs.policy import BuildModel, LoadedModel
from tunesmith.types import JudgeType, Task, Trajectory

MIN_TASKS = 2
MAX_CELL_CHARS = 60


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
    if len(tasks) < MIN_TASKS:
        raise DataError(f"train_dataset has {len(tasks)} row; tune_prompt needs at least {MIN_TASKS}")
    held_out = None if eval_dataset is None else load_fixed_tasks(eval_dataset, knob="eval_dataset")
    with agent_output(is_shown=False):
        return run_outside_of_loops(
            lambda: run_lockstep(
                run_prompt_tuning(
                    config,
                    tasks,
                    held_out,
                    initial_prompt=init_system_prompt,
                    workflow=workflow,
                    judge=judge_func,
                    model=student,
                    proposer=proposer,
                    build_model=choose_chat_model(chat_model),
                )
            )
        )


def choose_proposer(config: PromptTuneConfig, student: Candidate | None, prompt_model: Any) -> Candidate | None:
    """The model that proposes prompts; None if it is the one that the config names."""
    if prompt_model is not None:
        is_same = student is not None and prompt_model is student.given
        return student if is_same and student else build_candidate(prompt_model, label="prompt_model")
    if student is not None and "lm_model_name" not in config.model_fields_set:
        return student
    read_api_key(config.lm_api_key_env, knob="lm_api_key_env")
    return None


def check_dspy() -> None:
    missing = [name for name in ("dspy", "optuna") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"tune_prompt needs {' and '.join(missing)}: pip install 'tunesmith[prompt]'")


async def run_prompt_tuning(
    config: PromptTuneConfig,
    tasks: Sequence[Task],
    held_out: Sequence[Task] | None,
    *,
    initial_prompt: str,
    workflow: Callable[..., Any],
    judge: JudgeType,
    model: Candidate | None,
    proposer: Candidate | None,
    build_model: BuildModel,
) -> PromptTuneResult:
    """`model` is what the workflow receives; None if it has a model of its own. A proposer that is the same object
    shares its weights; without one the model of the config proposes."""
    limits = RunLimits(
        max_threads=config.eval_num_threads,
        timeout_s=config.timeout_s,
        max_failure_rate=config.max_failure_rate,
        seed=config.seed,
    )
    progress = ConsoleProgress()
    show: Callable[[str], None] = progress.show_line if config.eval_display_progress else lambda line: None
    try:
        student = LoadedModel(provider=ExternalModel(None))
        if model is not None:
            student = load_candidate(model, build_model=build_model)
        teacher = None
        if proposer is not None:
            loaded = student if proposer is model else load_candidate(proposer, build_model=build_model)
            teacher = Teacher(loaded, seed=config.seed)
        build = partial(PromptRuns, workflow=workflow, judge=judge, model=student, limits=limits, show=show)
        runs = build(tasks=tasks)
        from tunesmith.commands.tune_prompt.mipro import LoopSearch  # DSPy is optional and takes seconds

        search = LoopSearch(asyncio.get_running_loop(), runs, teacher)
        prompt = await search.optimize(config, initial_prompt)
        scores = None
        if held_out is not None:
            scores = await compare_held_out(build(tasks=held_out), config, initial_prompt, prompt, progress)
    finally:
        progress.close()
    result = PromptTuneResult.build(
        prompt, initial_prompt=initial_prompt, candidates=runs.list_scores(), num_runs=runs.num_runs, held_out=scores
    )
    progress.show_line(result.describe())
    return result


async def compare_held_out(
    runs: PromptRuns, config: PromptTuneConfig, initial_prompt: str, prompt: str, progress: ConsoleProgress
) -> HeldOutScores:
    """Run both prompts on all held-out tasks; raises RolloutError if too many runs of the initial one fail."""
    positions = range(len(runs.tasks))
    runs.show("held-out tasks:")
    if config.compare_performance:
        await runs.score(initial_prompt, positions, name="initial prompt")
    if prompt != initial_prompt or not config.compare_performance:
        await runs.score(prompt, positions, name="tuned prompt")
    tuned = await runs.run(prompt, positions)
    if not config.compare_performance:
        return HeldOutScores(initial=None, tuned=summarize(prompt, tuned), difference=None)
    initial = await runs.run(initial_prompt, positions)
    if config.eval_display_table:
        progress.show_line(format_held_out(initial, tuned, config.eval_display_table))
    return HeldOutScores(
        initial=summarize(initial_prompt, initial),
        tuned=summarize(prompt, tuned),
        difference=compare_known((run.reward for run in initial), (run.reward for run in tuned), seed=config.seed),
    )


def format_held_out(initial: Sequence[Trajectory], tuned: Sequence[Trajectory], num_tasks: int) -> str:
    """The first tasks with the rewards of both prompts and the answer under the tuned one."""

    def cell(text: str) -> str:
        return shorten(" ".join(text.split()), MAX_CELL_CHARS)

    def reward(run: Trajectory) -> str:
        return "failed" if run.reward is None else f"{run.reward:.4g}"

    rows = [
        [cell(str(dict(new.task.row))), reward(old), reward(new), cell(new.response_text)]
        for old, new in zip(initial[:num_tasks], tuned[:num_tasks], strict=True)
    ]
    return format_table(["task", "initial prompt", "tuned prompt", "answer under the tuned prompt"], rows)
