"""Tunes a system prompt: the optimizer proposes and evaluates prompts, then both prompts run on held-out tasks."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from tunesmith.commands.candidates.models import Candidate, LoadedModel, check_candidate, load_candidate
from tunesmith.commands.eval.comparison_table import format_table
from tunesmith.commands.eval.statistics import compare_paired
from tunesmith.commands.tune_prompt.prompt_runs import PromptRuns, summarize
from tunesmith.commands.tune_prompt.result import HeldOutScores, PromptTuneResult
from tunesmith.commands.tune_prompt.settings import LiteLlmModel, PromptTuning
from tunesmith.commands.tune_prompt.teacher import Teacher
from tunesmith.commands.tune_prompt.thread_output import silence
from tunesmith.errors import ConfigError, DataError, RolloutError
from tunesmith.monitor.console import ConsoleProgress
from tunesmith.rollout.failures import shorten
from tunesmith.rollout.service import ExternalModel
from tunesmith.runs.policy import BuildModel
from tunesmith.types import JudgeType, Task, Trajectory

T = TypeVar("T")
MIN_TASKS = 2
MAX_CELL_CHARS = 60


def check_dspy() -> None:
    missing = [name for name in ("dspy", "optuna") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"tune_prompt needs {' and '.join(missing)}: pip install 'tunesmith[prompt]'")


def check_tasks(tasks: Sequence[Task], *, knob: str) -> None:
    if len(tasks) < MIN_TASKS:
        raise DataError(f"{knob} has {len(tasks)} row; tune_prompt needs at least {MIN_TASKS}")


async def run_prompt_tuning(
    tuning: PromptTuning,
    tasks: Sequence[Task],
    held_out: Sequence[Task] | None,
    *,
    workflow: Callable[..., Any],
    judge: JudgeType,
    model: Candidate | None,
    proposer: Candidate | LiteLlmModel,
    build_model: BuildModel,
) -> PromptTuneResult:
    """`model` is what the workflow receives; None if it has a model of its own. A proposer that is the same object
    shares its weights."""
    progress = ConsoleProgress(first_step=0, total_steps=0, has_progress=False, log_interval_steps=1)
    show: Callable[[str], None] = progress.show_line if tuning.has_progress else lambda line: None
    try:
        with contextlib.ExitStack() as stack:
            for each in (model, proposer):
                if isinstance(each, Candidate):
                    check_candidate(each)
            student = LoadedModel(provider=ExternalModel(None))
            if model is not None:
                student = load_candidate(model, build_model=build_model)
            stack.enter_context(student.sampling())
            teacher = None
            if isinstance(proposer, Candidate):
                loaded = student if proposer is model else load_candidate(proposer, build_model=build_model)
                if loaded is not student:
                    stack.enter_context(loaded.sampling())
                teacher = Teacher(loaded, seed=tuning.limits.seed)
            build = partial(PromptRuns, workflow=workflow, judge=judge, model=student, limits=tuning.limits, show=show)
            runs = build(tasks=tasks)
            search = LoopSearch(asyncio.get_running_loop(), runs, teacher)
            prompt = await search.optimize(tuning, None if isinstance(proposer, Candidate) else proposer)
            scores = (
                None if held_out is None else await compare_held_out(build(tasks=held_out), tuning, prompt, progress)
            )
    finally:
        progress.close()
    result = PromptTuneResult.build(
        prompt,
        initial_prompt=tuning.initial_prompt,
        candidates=runs.list_scores(),
        num_runs=runs.num_runs,
        held_out=scores,
    )
    progress.show_line(result.describe())
    return result


async def compare_held_out(
    runs: PromptRuns, tuning: PromptTuning, prompt: str, progress: ConsoleProgress
) -> HeldOutScores:
    """Run both prompts on all held-out tasks; raises RolloutError if too many runs of the initial one fail."""
    positions = range(len(runs.tasks))
    runs.show("held-out tasks:")
    if tuning.is_compared:
        await runs.score(tuning.initial_prompt, positions, name="initial prompt")
    if prompt != tuning.initial_prompt or not tuning.is_compared:
        await runs.score(prompt, positions, name="tuned prompt")
    tuned = await runs.run(prompt, positions)
    if not tuning.is_compared:
        return HeldOutScores(initial=None, tuned=summarize(prompt, tuned), difference=None)
    initial = await runs.run(tuning.initial_prompt, positions)
    pairs = [
        (old.reward, new.reward)
        for old, new in zip(initial, tuned, strict=True)
        if old.reward is not None and new.reward is not None
    ]
    if tuning.num_shown_tasks:
        progress.show_line(format_held_out(initial, tuned, tuning.num_shown_tasks))
    return HeldOutScores(
        initial=summarize(tuning.initial_prompt, initial),
        tuned=summarize(prompt, tuned),
        difference=compare_paired(*zip(*pairs, strict=True), seed=tuning.limits.seed) if pairs else None,
    )


def format_held_out(initial: Sequence[Trajectory], tuned: Sequence[Trajectory], num_tasks: int) -> str:
    """The first tasks with the rewards of both prompts and the answer under the tuned one."""

    def cell(text: str) -> str:
        return shorten(" ".join(text.replace("|", "/").split()), MAX_CELL_CHARS)

    def reward(run: Trajectory) -> str:
        return "failed" if run.reward is None else f"{run.reward:.4g}"

    rows = [
        [cell(str(dict(new.task.row))), reward(old), reward(new), cell(new.response_text)]
        for old, new in zip(initial[:num_tasks], tuned[:num_tasks], strict=True)
    ]
    return format_table(["task", "initial prompt", "tuned prompt", "answer under the tuned prompt"], rows)


class _StoppedError(BaseException):
    """Ends the optimizer's thread; DSPy catches every Exception."""


class LoopSearch:
    """Runs the optimizer in a thread, and what it calls on the event loop. The first error ends the optimization."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runs: PromptRuns, teacher: Teacher | None) -> None:
        self._loop = loop
        self._runs = runs
        self._teacher = teacher
        self._is_stopped = False
        self._error: BaseException | None = None

    def run_one(self, prompt: str, position: int) -> Trajectory:
        return self._call(self._runs.run(prompt, [position]))[0]

    def score(self, prompt: str, positions: Sequence[int]) -> float:
        return self._call(self._runs.score(prompt, positions))

    def ask(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
        assert self._teacher is not None, "prompts are proposed through LiteLLM"
        return self._call(self._teacher.ask(messages, fields))

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._is_stopped:  # interrupted
            work.close()
            raise _StoppedError
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except BaseException as error:
            self._error = self._error or error
            raise _StoppedError from error

    async def optimize(self, tuning: PromptTuning, proposer: LiteLlmModel | None) -> str:
        """The best prompt that the optimizer finds."""
        from tunesmith.commands.tune_prompt.mipro import optimize_prompt  # DSPy is optional and takes seconds

        found: asyncio.Future[str] = self._loop.create_future()

        def deliver(prompt: str | None, error: BaseException | None) -> None:
            if found.done():
                return
            if prompt is not None:
                found.set_result(prompt)
            else:
                assert error is not None
                found.set_exception(error)

        def work() -> None:
            prompt: str | None = None
            error: BaseException | None = None
            try:
                prompt = optimize_prompt(self, self._runs.tasks, tuning, proposer=proposer)
            except _StoppedError:
                error = self._error
            except Exception as raised:  # noqa: BLE001 - raised again on the event loop
                error = RolloutError(f"DSPy found no prompt: {type(raised).__name__}: {raised}")
                error.__cause__ = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed if it was interrupted
                self._loop.call_soon_threadsafe(deliver, prompt, error)

        thread = threading.Thread(target=work, name="tunesmith-prompts", daemon=True)
        try:
            with silence(thread):
                thread.start()
                return await found
        finally:
            self._is_stopped = True
