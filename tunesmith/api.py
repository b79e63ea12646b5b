"""Public functions, one for each command: train, evaluate, prepare, export, and run a pipeline.

Each takes the config object of its command or the path of its YAML file, which `load_settings` reads as the table of
commands says, and returns a small result that holds no weights. All may be called while an event loop runs, as in a
notebook. `compat` translates AgentScope's classes and Trinity-RFT's files to a `RunConfig` and chooses the class of the
chat model that workflows receive; `commands` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tunesmith.algorithms.advantages.group import RunOutcome
from tunesmith.algorithms.own_functions import OwnFunctions
from tunesmith.algorithms.scores import TokenLosses, TokenScores
from tunesmith.commands import pass_rate
from tunesmith.commands.check.run import check
from tunesmith.commands.collect.run import Collected, collect
from tunesmith.commands.doctor.diagnose import diagnose as doctor
from tunesmith.commands.eval.compare import run_comparison
from tunesmith.commands.eval.comparison import EvalResult
from tunesmith.commands.eval.suites import apply_suite
from tunesmith.commands.export.run import ExportResult, run_export
from tunesmith.commands.pass_rate import PassRates
from tunesmith.commands.prepare.run import PrepareResult, run_prepare
from tunesmith.commands.run.config import PipelineConfig, StageSelection
from tunesmith.commands.run.folder import PipelineResult, StageOutcome
from tunesmith.commands.run.run import run_pipeline as run_selected
from tunesmith.commands.select_model.judges import avg_time_judge, avg_token_consumption_judge
from tunesmith.commands.select_model.select import ModelSelection, select_model
from tunesmith.commands.serve.run import run_serving
from tunesmith.commands.settings import list_paths, load_settings
from tunesmith.commands.sft.train import OfflineResult, run_preference, run_sft
from tunesmith.commands.table import find_command
from tunesmith.commands.tune.callbacks import (
    Callbacks,
    CheckpointEnd,
    EvaluationEnd,
    OnCheckpoint,
    OnEvaluation,
    OnStepEnd,
    StepEnd,
    Stop,
)
from tunesmith.commands.tune.load_tasks import CustomComponents
from tunesmith.commands.tune.tune import TuneResult, run_tuning
from tunesmith.commands.tune_prompt.prompt_runs import PromptTuneResult
from tunesmith.commands.tune_prompt.tune import tune_prompt
from tunesmith.compat.agentscope_config import (
    AlgorithmConfig,
    DatasetConfig,
    PromptTuneConfig,
    TaskSelectorConfig,
    TunerModelConfig,
    collect_own_selectors,
    translate_tune_arguments,
)
from tunesmith.compat.chat_models import agent_output, choose_chat_model
from tunesmith.compat.tinker_config import TinkerConfig
from tunesmith.config import (
    CollectConfig,
    EvalConfig,
    ExportSection,
    PreferenceConfig,
    PrepareSection,
    RunConfig,
    SftConfig,
)
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.errors import ConfigError
from tunesmith.model.prepare import prepare_model
from tunesmith.monitor.metric_table import MetricTable
from tunesmith.rollout.chat_model import ChatModel
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.runs.launch import is_ray_driver, tune_on_ray
from tunesmith.runs.load_config import change_section, load_section
from tunesmith.runs.load_function import load_functions
from tunesmith.runs.run_folder import AGENTSCOPE_PROJECT
from tunesmith.tool_log import replayable
from tunesmith.types import JudgeOutput, JudgeType, WorkflowOutput, WorkflowType

__all__ = [
    "AlgorithmConfig",
    "ChatModel",
    "CheckpointEnd",
    "DatasetConfig",
    "EvalResult",
    "EvaluationEnd",
    "ExportResult",
    "JudgeOutput",
    "JudgeType",
    "MetricTable",
    "ModelSelection",
    "OfflineResult",
    "PassRates",
    "PipelineResult",
    "PrepareResult",
    "PromptTuneConfig",
    "PromptTuneResult",
    "RunOutcome",
    "StageOutcome",
    "StepEnd",
    "Stop",
    "TaskSelectorConfig",
    "TinkerConfig",
    "TokenLosses",
    "TokenScores",
    "TuneResult",
    "TunerModelConfig",
    "WorkflowOutput",
    "WorkflowType",
    "avg_time_judge",
    "avg_token_consumption_judge",
    "check",
    "check_judge_function",
    "check_workflow_function",
    "collect_conversations",
    "doctor",
    "evaluate",
    "export",
    "measure_pass_rates",
    "prefer",
    "prepare",
    "prepare_model",
    "replayable",
    "run_pipeline",
    "select_model",
    "serve",
    "sft",
    "tune",
    "tune_prompt",
]

PathLike = str | Path
Returned = TypeVar("Returned")


def tune(
    config: RunConfig | PathLike | None = None,
    *,
    workflow_func: WorkflowType | None = None,
    judge_func: JudgeType | None = None,
    train_dataset: DatasetConfig | Mapping[str, DatasetConfig] | None = None,
    eval_dataset: DatasetConfig | Mapping[str, DatasetConfig] | None = None,
    model: TunerModelConfig | None = None,
    auxiliary_models: Mapping[str, TunerModelConfig] | None = None,
    environment: str | Mapping[str, Any] | None = None,
    algorithm: AlgorithmConfig | None = None,
    project_name: str | None = None,
    experiment_name: str | None = None,
    monitor_type: str | None = None,
    config_path: PathLike | None = None,
    continue_from_checkpoint: bool = False,
    overrides: Sequence[str] = (),
    operators: Sequence[Callable[..., Any]] = (),
    advantage_func: Callable[..., Any] | None = None,
    loss_func: Callable[..., Any] | None = None,
    on_step_end: OnStepEnd | None = None,
    on_evaluation: OnEvaluation | None = None,
    on_checkpoint: OnCheckpoint | None = None,
) -> TuneResult:
    """Train the model inside an agent; returns the run folder and the last checkpoint.

    `config` is a RunConfig or a run file (YAML) of Tunesmith or of Trinity-RFT, and holds every setting. In place of
    `config`, AgentScope's form is accepted: `model` to `monitor_type` override the values of the run file
    `config_path`, if it is given; a mapping of training sets is a mixture of them. In both forms `environment` names an
    environment with tasks ("reasoning_gym:countdown"), or is its section, and `overrides` ("a.b=value" with any key of
    a run file) override all other values.

    Functions replace those that the config names: `workflow_func`, `judge_func`, the algorithm's `advantage_func` and
    `loss_func`, and the callbacks, which get a record (`StepEnd`, `EvaluationEnd`, `CheckpointEnd`) and may return
    `Stop`. `operators` on the groups of a step are applied after the operators of the config.

    Raises ConfigError, DataError or ModelError before weights load, RolloutError when too many rollouts fail, and
    TrainingError when an update fails its checks (finite values, `trainer.mismatch_stop`). May be called while an event
    loop runs, as in a notebook; Ctrl-C then ends the run as it does in a script.
    """
    objects: dict[str, Any] = {
        "train_dataset": train_dataset, "eval_dataset": eval_dataset, "model": model,
        "auxiliary_models": auxiliary_models, "algorithm": algorithm, "project_name": project_name,
        "experiment_name": experiment_name, "monitor_type": monitor_type,
    }  # fmt: skip
    custom = CustomComponents(
        selectors=collect_own_selectors(train_dataset),
        operators=tuple(operators),
        functions=OwnFunctions(advantage=advantage_func, loss=loss_func),
        callbacks=Callbacks(on_step_end=on_step_end, on_evaluation=on_evaluation, on_checkpoint=on_checkpoint),
    )
    changes = [*overrides, *custom.list_overrides()]
    values: dict[str, Any] = {"continue_from_checkpoint": True} if continue_from_checkpoint else {}
    if environment is not None:
        values["environment"] = environment
    settings = load_tune_config(config, objects, config_path, changes, values=values)
    return run_tune(settings, workflow_func, judge_func, custom)


def load_tune_config(
    config: RunConfig | PathLike | None,
    objects: dict[str, Any],
    config_path: PathLike | None,
    overrides: Sequence[str],
    *,
    values: Mapping[str, Any],
) -> RunConfig:
    """The run config of either form of `tune`, with nested `values` and then the overrides applied."""
    if config is not None:
        refuse_both_forms(objects | {"config_path": config_path})
    elif objects["model"] is None and config_path is None and not any(o.startswith("model.path=") for o in overrides):
        raise ConfigError(
            "model is missing: give tune() a config, a TunerModelConfig, or a config_path that sets model.path"
        )
    values = {**translate_tune_arguments(**objects), **values}
    settings: RunConfig = load_settings(
        find_command("tune"), config_path if config is None else config, overrides, values=values
    )
    if config is None and "project" not in settings.model_fields_set:
        return settings.model_copy(update={"project": AGENTSCOPE_PROJECT})
    return settings


def refuse_both_forms(objects: Mapping[str, Any]) -> None:
    """Raise ConfigError if arguments of AgentScope's form are given beside `config`."""
    names = [name for name, value in objects.items() if value is not None]
    if names:
        raise ConfigError(
            f"tune() got config and {', '.join(names)}: config holds every setting, so put these into it, or change "
            "single keys with overrides=['key=value']"
        )


def run_tune(
    settings: RunConfig, workflow_func: WorkflowType | None, judge_func: JudgeType | None, custom: CustomComponents
) -> TuneResult:
    """Train with these functions, or those that the config names."""
    if workflow_func is not None:
        check_workflow_function(workflow_func, allows_sync=True)
    if judge_func is not None:
        check_judge_function(judge_func)
    if is_ray_driver(settings):
        tune_rank = partial(run_tune, workflow_func=workflow_func, judge_func=judge_func, custom=custom)
        return tune_on_ray(settings, list_paths(settings), tune_rank)
    workflow, judge = load_functions(settings, workflow_func, judge_func)
    return run_agents(run_tuning, settings, workflow=workflow, judge=judge, custom=custom)


def run_agents(work: Callable[..., Returned], config: RunConfig, **arguments: Any) -> Returned:
    """Call `work` with the config and the chat model that it chooses, also in a notebook."""
    build_model = choose_chat_model(config.rollout.chat_model)
    with agent_output(is_shown=config.rollout.has_agent_output):
        return run_outside_of_loops(lambda: work(config, build_model=build_model, **arguments))


def serve(
    config: RunConfig | PathLike, *, judge_func: JudgeType | None = None, overrides: Sequence[str] = ()
) -> TuneResult:
    """Train agents that run as programs of their own and take tasks over HTTP (docs/serve.md)."""
    return run_agents(run_serving, load_settings(find_command("serve"), config, overrides), judge=judge_func)


def sft(config: SftConfig | PathLike, *, out: PathLike, overrides: Sequence[str] = ()) -> OfflineResult:
    """Fine-tune a model on conversations into the folder `out`; an unfinished training in it is resumed."""
    return run_sft(load_settings(find_command("sft"), config, overrides), out_dir=Path(out))


def prefer(config: PreferenceConfig | PathLike, *, out: PathLike, overrides: Sequence[str] = ()) -> OfflineResult:
    """Train a model on preferences into the folder `out`; an unfinished training in it is resumed."""
    return run_preference(load_settings(find_command("prefer"), config, overrides), out_dir=Path(out))


def evaluate(
    config: RunConfig | EvalConfig | PathLike,
    *,
    workflow_func: WorkflowType | None = None,
    judge_func: JudgeType | None = None,
    models: Mapping[str, PathLike] | None = None,
    out: PathLike | None = None,
    has_plot: bool = False,
    suite: str | None = None,
    overrides: Sequence[str] = (),
) -> EvalResult:
    """Compare models on the held-out tasks of a run config or an evaluation config.

    `suite` ("tir" or "tir_paper", for agents with tools) replaces the judge by measures under one name. `models` maps
    labels to model folders, hub ids or run folders; by default those of the evaluation config, or the model of the run
    config. With the folder `out` the results are written there, and a killed evaluation resumes.
    """
    settings: RunConfig | EvalConfig = load_settings(find_command("eval"), config, overrides)
    if isinstance(settings, EvalConfig):
        run, compared, has_plot = settings.to_run_config(), settings.models, has_plot or settings.has_plot
        suite = suite or settings.suite
    else:
        run, compared = settings, {settings.model.path: settings.model.path}
    if models:
        compared = {label: str(path) for label, path in models.items()}
    if suite is not None and judge_func is not None:
        raise ConfigError(f"suite={suite!r} has a judge of its own: leave out judge_func")
    run = apply_suite(run, suite)
    workflow, judge = load_functions(run, workflow_func, judge_func)
    folder = None if out is None else Path(out)
    comparison = run_agents(
        run_comparison,
        run,
        models=compared,
        workflow=workflow,
        judge=judge,
        out=folder,
        has_plot=has_plot,
        suite=suite,
    )
    return EvalResult(folder=folder, sets=comparison)


def measure_pass_rates(
    config: RunConfig | PathLike,
    *,
    field: str,
    out: PathLike,
    num_runs: int = 8,
    tool_keys: Sequence[str] = (),
    workflow_func: WorkflowType | None = None,
    judge_func: JudgeType | None = None,
    overrides: Sequence[str] = (),
) -> PassRates:
    """Write the training tasks of a run config to the JSON lines file `out`, with the pass rate of its model in
    `field`. With `tool_keys`, the metrics that count tool calls, `<field>_correctness` and `<field>_tool_calls` list
    the numbers of each scored rollout."""
    settings: RunConfig = load_settings(find_command("pass-rate"), config, overrides)
    workflow, judge = load_functions(settings, workflow_func, judge_func)
    return run_agents(
        pass_rate.measure_pass_rates,
        settings,
        workflow=workflow,
        judge=judge,
        field=field,
        num_runs=num_runs,
        out=Path(out),
        tool_keys=tool_keys,
    )


def collect_conversations(
    config: CollectConfig | RunConfig | PathLike,
    *,
    out: PathLike,
    workflow_func: WorkflowType | None = None,
    judge_func: JudgeType | None = None,
    overrides: Sequence[str] = (),
) -> Collected:
    """Run the workflow on the training tasks and write the conversations that the judge accepts to the JSON lines file
    `out`, as rows for `sft`: those of the run's own model (rejection sampling), or of `teacher` (distillation)."""
    if isinstance(config, RunConfig) and not isinstance(config, CollectConfig):
        config = CollectConfig(**config.model_dump(exclude_unset=True))
    settings: CollectConfig = load_settings(find_command("collect"), config, overrides)
    workflow, judge = load_functions(settings, workflow_func, judge_func)
    return run_agents(collect, settings, workflow=workflow, judge=judge, out=Path(out))


def prepare(config: PrepareSection | PathLike, *, out: PathLike, overrides: Sequence[str] = ()) -> PrepareResult:
    """Convert questions with worked solutions, such as GSM8K, to conversations in the folder `out`."""
    settings = load_settings(find_command("prepare"), config, overrides)
    return run_outside_of_loops(lambda: run_prepare(settings, out_dir=Path(out)))


def export(
    model: PathLike | ExportSection,
    *,
    out: PathLike,
    formats: Sequence[str] | None = None,
    gguf_types: Sequence[str] | None = None,
    name: str | None = None,
    push: str | None = None,
    is_public: bool = False,
    overrides: Sequence[str] = (),
) -> ExportResult:
    """Export a model to the folder `out` as a Hugging Face folder ("hf"), PEFT adapter ("adapter") or GGUF files
    ("gguf"), and verify each against the source.

    `model` is the folder of a model, adapter or run (its last checkpoint), a hub id, or an ExportSection with all
    settings, which the other arguments override. `push` uploads the format hf, or adapter if there is no other, to the
    hub as OWNER/NAME, private unless `is_public`.
    """
    given = {"formats": formats, "gguf_types": gguf_types, "name": name}
    changes = {key: value for key, value in given.items() if value is not None}
    if isinstance(model, ExportSection):
        settings = change_section(model, overrides, values=changes)
    else:
        settings = load_section(ExportSection, None, overrides, values={"path": str(model), **changes})
    return run_export(settings, out_dir=Path(out), push=push, is_public=is_public)


def run_pipeline(
    config: PipelineConfig | PathLike,
    *,
    only: str | None = None,
    start_from: str | None = None,
    is_rerun: bool = False,
    overrides: Sequence[str] = (),
) -> PipelineResult:
    """Run the stages of a pipeline that are not done, up to the first that fails.

    `only` runs one stage, `start_from` that stage and all later ones; `is_rerun` also runs selected stages that are
    done, after moving their outputs aside.
    """
    settings: PipelineConfig = load_settings(find_command("run"), config, overrides)
    return run_selected(settings, selection=StageSelection(only=only, start_from=start_from, is_rerun=is_rerun))
