"""Public functions: `tune`, with the names of AgentScope's tuner, and the functions of the commands that run agents.

`compat` translates AgentScope's classes and Trinity-RFT's files to a `RunConfig`; `pipeline` runs it. The class of the
chat model that workflows receive is chosen here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.compat.agentscope import (
    AlgorithmConfig,
    DatasetConfig,
    TaskSelectorConfig,
    TunerModelConfig,
    collect_own_selectors,
    translate_tune_arguments,
)
from tunesmith.compat.agentscope_model import build_agentscope_model, has_agentscope
from tunesmith.compat.agentscope_output import agent_output
from tunesmith.config import EvalConfig, PipelineConfig, RunConfig
from tunesmith.engine.event_loop.signal_handlers import interrupt_thread
from tunesmith.errors import ConfigError
from tunesmith.pipeline.diagnosis.diagnose import diagnose as doctor
from tunesmith.pipeline.eval.compare import run_comparison, run_eval
from tunesmith.pipeline.eval.comparison import Comparison
from tunesmith.pipeline.eval.pass_rates import PassRates, measure_pass_rates
from tunesmith.pipeline.rl.load_tasks import CustomComponents
from tunesmith.pipeline.rl.tune import TuneResult, run_tuning
from tunesmith.pipeline.session.load_function import load_functions
from tunesmith.pipeline.session.policy import BuildModel
from tunesmith.pipeline.stages.plan import StageSelection
from tunesmith.pipeline.stages.run import run_pipeline
from tunesmith.rollout.chat_model import ChatModel, Endpoint
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.run_files import load_run_file
from tunesmith.types import JudgeOutput, JudgeType, WorkflowOutput, WorkflowType

__all__ = [
    "AlgorithmConfig",
    "DatasetConfig",
    "JudgeOutput",
    "JudgeType",
    "TaskSelectorConfig",
    "TuneResult",
    "TunerModelConfig",
    "WorkflowOutput",
    "WorkflowType",
    "check_judge_function",
    "check_workflow_function",
    "doctor",
    "evaluate_config",
    "load_run_file",
    "measure_config",
    "run_config",
    "run_pipeline_config",
    "tune",
]

Result = TypeVar("Result")

WAIT_S = 1.0
"""Longest wait for a thread at a time; on Windows Ctrl-C is noticed only between two waits."""
INTERRUPT_LINES = (
    b"tunesmith: SIGINT: ending the run; a second signal interrupts the running code\n",
    b"tunesmith: SIGINT: interrupting the running code; a third signal leaves it running\n",
)
MAX_INTERRUPTS = len(INTERRUPT_LINES)


def tune(
    *,
    workflow_func: WorkflowType,
    judge_func: JudgeType | None = None,
    train_dataset: DatasetConfig | Mapping[str, DatasetConfig] | None = None,
    eval_dataset: DatasetConfig | Mapping[str, DatasetConfig] | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig] | None = None,
    algorithm: AlgorithmConfig | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
    config_path: str | Path | None = None,
    continue_from_checkpoint: bool = False,
    overrides: Sequence[str] = (),
    operators: Sequence[Callable[..., Any]] = (),
) -> TuneResult:
    """Train the model inside an agent; returns the run folder and the last checkpoint.

    `config_path` is a run file of Tunesmith or of Trinity-RFT. The other arguments override its values, and `overrides`
    ("a.b=value" with any key of a run file) override both. A mapping of training sets is a mixture of them. `operators`
    are functions on the groups of a step, applied after the operators of the file.

    Raises ConfigError, DataError or ModelError before weights load, RolloutError when too many rollouts fail, and
    TrainingError when an update fails its checks (finite values, `trainer.mismatch_stop`). May be called while an event
    loop runs, as in a notebook; Ctrl-C then ends the run as it does in a script.
    """
    check_workflow_function(workflow_func)
    if judge_func is not None:
        check_judge_function(judge_func)
    given = translate_tune_arguments(
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        model=model,
        auxiliary_models=auxiliary_models,
        algorithm=algorithm,
        project_name=project_name,
        experiment_name=experiment_name,
        monitor_type=monitor_type,
    )
    if continue_from_checkpoint:
        given["continue_from_checkpoint"] = True
    if model is None and config_path is None and not any(each.startswith("model.path=") for each in overrides):
        raise ConfigError("model is missing: give tune() a TunerModelConfig, or a config_path that sets model.path")
    config = load_run_file(config_path, overrides, values=given)
    custom = CustomComponents(selectors=collect_own_selectors(train_dataset), operators=tuple(operators))
    build_model = choose_chat_model(config)
    with agent_output(is_shown=config.rollout.has_agent_output):
        return run_outside_of_loops(
            lambda: run_tuning(config, workflow=workflow_func, judge=judge_func, build_model=build_model, custom=custom)
        )


def run_config(config: RunConfig) -> TuneResult:
    """Train with the workflow and the judge that a run file names."""
    with agent_output(is_shown=config.rollout.has_agent_output):
        workflow, judge = load_functions(config)
        return run_tuning(config, workflow=workflow, judge=judge, build_model=choose_chat_model(config))


def evaluate_config(
    settings: RunConfig | EvalConfig,
    *,
    models: Mapping[str, str] | None = None,
    out: str | None = None,
    has_plot: bool = False,
) -> Comparison:
    """Evaluate models (label -> path) on the held-out tasks of a run file or an evaluation file; write the results to
    the folder `out`."""
    folder = None if out is None else Path(out)
    if isinstance(settings, EvalConfig):
        changes = {"models": dict(models or settings.models), "has_plot": has_plot or settings.has_plot}
        settings = settings.model_copy(update=changes)
        config = settings.to_run_config()
        with agent_output(is_shown=config.rollout.has_agent_output):
            return run_eval(settings, out_dir=folder, build_model=choose_chat_model(config))
    with agent_output(is_shown=settings.rollout.has_agent_output):
        workflow, judge = load_functions(settings)
        return run_comparison(
            settings,
            models=models or {settings.model.path: settings.model.path},
            workflow=workflow,
            judge=judge,
            build_model=choose_chat_model(settings),
            out=folder,
            has_plot=has_plot,
        )


def measure_config(config: RunConfig, *, field: str, num_runs: int, out: str) -> PassRates:
    """Write the training tasks of a run file to `out`, with the pass rate of its model in `field`."""
    with agent_output(is_shown=config.rollout.has_agent_output):
        workflow, judge = load_functions(config)
        return measure_pass_rates(
            config,
            workflow=workflow,
            judge=judge,
            build_model=choose_chat_model(config),
            field=field,
            num_runs=num_runs,
            out=Path(out),
        )


def run_pipeline_config(config: PipelineConfig, *, choice: StageSelection = StageSelection()) -> Path:
    """Run the stages of a pipeline file that are not done; returns the path of the report."""
    with agent_output(is_shown=False) as switch_output:

        def choose_model(config: RunConfig) -> BuildModel:
            switch_output(config.rollout.has_agent_output)
            return choose_chat_model(config)

        return run_pipeline(config, choose_model=choose_model, selection=choice)


def choose_chat_model(config: RunConfig) -> BuildModel:
    """The class of `model` in workflows: AgentScope's OpenAIChatModel, or Tunesmith's own on the OpenAI client."""
    kind = config.rollout.chat_model
    is_installed = has_agentscope()
    if kind == "agentscope" and not is_installed:
        raise ConfigError("rollout.chat_model='agentscope' needs AgentScope: pip install 'tunesmith[agentscope]'")
    if kind == "agentscope" or (kind == "auto" and is_installed):
        return build_agentscope_chat_model
    return build_openai_chat_model


def build_openai_chat_model(endpoint: Endpoint, options: Mapping[str, Any]) -> Any:
    return ChatModel(endpoint, options=options)


def build_agentscope_chat_model(endpoint: Endpoint, options: Mapping[str, Any]) -> Any:
    return build_agentscope_model(endpoint, options=options)


def is_event_loop_running() -> bool:
    """Whether an event loop runs in the calling thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def run_outside_of_loops(work: Callable[[], Result]) -> Result:
    """Run `work`, which starts an event loop; in a new thread if the calling thread already runs one.

    Ctrl-C while the new thread runs interrupts `work` there and raises KeyboardInterrupt once it has ended. As in a
    command, the second Ctrl-C interrupts whatever runs; the third raises at once and leaves the thread running.
    """
    if not is_event_loop_running():
        return work()
    outcome: list[Result] = []
    errors: list[BaseException] = []
    has_ended = threading.Event()

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)
        finally:
            has_ended.set()

    thread = threading.Thread(target=run, name="tunesmith", daemon=True)
    with interrupts_raised():
        thread.start()
        is_interrupted = wait_for_thread(thread, has_ended)
    if is_interrupted and not (errors and isinstance(errors[0], KeyboardInterrupt)):
        raise KeyboardInterrupt from (errors[0] if errors else None)
    if errors:
        raise errors[0]
    return outcome[0]


def wait_for_thread(thread: threading.Thread, has_ended: threading.Event) -> bool:
    """Wait for the end of the thread's work; Ctrl-C is passed on to it. Returns whether there was one.

    Waits for the event, because a `Thread.join` that Ctrl-C interrupts takes the thread for ended.
    """
    num_interrupts = 0
    while True:
        try:
            while not has_ended.wait(WAIT_S):
                pass
        except KeyboardInterrupt:
            num_interrupts += 1
            if num_interrupts > MAX_INTERRUPTS:
                raise
            os.write(2, INTERRUPT_LINES[num_interrupts - 1])
            interrupt_thread(thread)
        else:
            thread.join()
            return num_interrupts > 0


@contextlib.contextmanager
def interrupts_raised() -> Iterator[None]:
    """Within: Ctrl-C raises KeyboardInterrupt, although `asyncio.run` installed a handler that cancels its main task,
    which could not happen before the caller awaits again."""
    handler = signal.getsignal(signal.SIGINT)
    is_of_runner = isinstance(getattr(getattr(handler, "func", None), "__self__", None), asyncio.Runner)
    if not is_of_runner or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
