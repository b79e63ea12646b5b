"""Public functions, one for each command: train, evaluate, prepare, export, and run a pipeline.

Each takes the config object of its command or the path of its YAML file, which `load_settings` reads as the table of
commands says, and returns a small result that holds no weights. All may be called while an event loop runs, as in a
notebook. `compat` translates AgentScope's classes and Trinity-RFT's files to a `RunConfig` and chooses the class of the
chat model that workflows receive; `commands` does the work.

As the command line does, the functions import what does the work by its name, once the settings are checked: importing
torch and transformers takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.arguments import check_list
from tunesmith.cluster.rank_info import is_ray_worker
from tunesmith.commands.run.config import PipelineConfig, StageSelection
from tunesmith.commands.settings import check_overrides, list_paths, load_settings
from tunesmith.commands.table import find_command, import_named
from tunesmith.compat.agentscope_config import (
    AlgorithmConfig,
    DatasetConfig,
    TunerModelConfig,
    collect_own_selectors,
    translate_tune_arguments,
)
from tunesmith.config import (
    CollectConfig,
    EvalConfig,
    ExportSection,
    PreferenceConfig,
    PrepareSection,
    RunConfig,
    SftConfig,
)
from tunesmith.config.run import AGENTSCOPE_PROJECT
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.errors import ConfigError
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.runs.load_config import change_section, load_section
from tunesmith.runs.load_function import CustomComponents, load_functions, name_function
from tunesmith.types import JudgeType, WorkflowType

if TYPE_CHECKING:
    from tunesmith.commands.collect.run import Collected
    from tunesmith.commands.eval.comparison import EvalResult
    from tunesmith.commands.export.run import ExportResult
    from tunesmith.commands.pass_rate import PassRates
    from tunesmith.commands.prepare.run import PrepareResult
    from tunesmith.commands.run.folder import PipelineResult
    from tunesmith.commands.sft.train import OfflineResult
    from tunesmith.commands.tune.callbacks import OnCheckpoint, OnEvaluation, OnStepEnd
    from tunesmith.commands.tune.tune import TuneResult

PathLike = str | Path


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
    values = translate_tune_arguments(**objects)
    check_list("operators", operators, callable, items="functions; those with a name belong in experience.operators")
    check_overrides(overrides)
    functions = {
        "algorithm.advantage": advantage_func, "algorithm.loss": loss_func, "callbacks.on_step_end": on_step_end,
        "callbacks.on_evaluation": on_evaluation, "callbacks.on_checkpoint": on_checkpoint,
    }  # fmt: skip
    custom = CustomComponents(
        selectors=collect_own_selectors(train_dataset),
        operators=operators,
        functions={knob: function for knob, function in functions.items() if function is not None},
    )
    changes = [*overrides, *(f"{knob}={name_function(function)}" for knob, function in custom.functions.items())]
    if continue_from_checkpoint:
        values["continue_from_checkpoint"] = True
    if environment is not None:
        values["environment"] = environment
    if config is not None:
        names = [name for name, value in (objects | {"config_path": config_path}).items() if value is not None]
        if names:
            raise ConfigError(
                f"tune() got config and {', '.join(names)}: config holds every setting, so put these into it, or "
                "change single keys with overrides=['key=value']"
            )
    elif model is None and config_path is None and not any(each.startswith("model.path=") for each in changes):
        raise ConfigError(
            "model is missing: give tune() a config, a TunerModelConfig, or a config_path that sets model.path"
        )
    file = config_path if config is None else config
    settings: RunConfig = load_settings(find_command("tune"), file, changes, values=values)
    if config is None and "project" not in settings.model_fields_set:
        settings = settings.model_copy(update={"project": AGENTSCOPE_PROJECT})
    return run_tune(settings, workflow_func, judge_func, custom)


def run_tune(
    settings: RunConfig, workflow_func: WorkflowType | None, judge_func: JudgeType | None, custom: CustomComponents
) -> TuneResult:
    """Train with these functions, or those that the config names."""
    if workflow_func is not None:
        check_workflow_function(workflow_func, allows_sync=True)
    if judge_func is not None:
        check_judge_function(judge_func)
    result: TuneResult
    if settings.cluster.launcher == "ray" and not is_ray_worker():
        tune_rank = partial(run_tune, workflow_func=workflow_func, judge_func=judge_func, custom=custom)
        result = import_named("tunesmith.runs.launch:tune_on_ray")(settings, list_paths(settings), tune_rank)
        return result
    workflow, judge = load_functions(settings, workflow_func, judge_func)
    work = "tunesmith.commands.tune.tune:run_tuning"
    result = run_agents(work, settings, workflow=workflow, judge=judge, custom=custom)
    return result


def run_agents(work: str, config: RunConfig | EvalConfig, **arguments: Any) -> Any:
    """Call the function `work` with the config and the chat model that it chooses, also in a notebook."""
    build_model = import_named("tunesmith.compat.chat_models:choose_chat_model")(config.rollout.chat_model)
    agent_output = import_named("tunesmith.compat.chat_models:agent_output")
    with agent_output(is_shown=config.rollout.has_agent_output):
        return run_outside_of_loops(lambda: import_named(work)(config, build_model=build_model, **arguments))


def serve(
    config: RunConfig | PathLike, *, judge_func: JudgeType | None = None, overrides: Sequence[str] = ()
) -> TuneResult:
    """Train agents that run as programs of their own and take tasks over HTTP (docs/serve.md)."""
    settings = load_settings(find_command("serve"), config, overrides)
    result: TuneResult = run_agents("tunesmith.commands.serve:run_serving", settings, judge=judge_func)
    return result


def sft(config: SftConfig | PathLike, *, out: PathLike, overrides: Sequence[str] = ()) -> OfflineResult:
    """Fine-tune a model on conversations into the folder `out`; an unfinished training in it is resumed."""
    return _train_offline("sft", config, out, overrides)


def prefer(config: PreferenceConfig | PathLike, *, out: PathLike, overrides: Sequence[str] = ()) -> OfflineResult:
    """Train a model on preferences into the folder `out`; an unfinished training in it is resumed."""
    return _train_offline("prefer", config, out, overrides)


def _train_offline(name: str, config: object, out: PathLike, overrides: Sequence[str]) -> OfflineResult:
    settings = load_settings(find_command(name), config, overrides)
    result: OfflineResult = import_named("tunesmith.commands.sft.train:run_offline")(settings, out_dir=Path(out))
    return result


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
    if models is not None and not isinstance(models, Mapping):
        raise ConfigError(f"models must map labels to paths, as {{'base': 'models/base'}}, got {models!r}")
    result: EvalResult = run_agents(
        "tunesmith.commands.eval.compare:run_eval",
        load_settings(find_command("eval"), config, overrides),
        workflow=workflow_func,
        judge=judge_func,
        models=None if models is None else {label: str(path) for label, path in models.items()},
        out=None if out is None else Path(out),
        has_plot=has_plot,
        suite=suite,
    )
    return result


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
    result: PassRates = run_agents(
        "tunesmith.commands.pass_rate:measure_pass_rates",
        settings,
        workflow=workflow,
        judge=judge,
        field=field,
        num_runs=num_runs,
        out=Path(out),
        tool_keys=tool_keys,
    )
    return result


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
    result: Collected = run_agents(
        "tunesmith.commands.collect.run:collect", settings, workflow=workflow, judge=judge, out=Path(out)
    )
    return result


def prepare(config: PrepareSection | PathLike, *, out: PathLike, overrides: Sequence[str] = ()) -> PrepareResult:
    """Convert questions with worked solutions, such as GSM8K, to conversations in the folder `out`."""
    settings = load_settings(find_command("prepare"), config, overrides)
    run_prepare = import_named("tunesmith.commands.prepare.run:run_prepare")
    result: PrepareResult = run_outside_of_loops(lambda: run_prepare(settings, out_dir=Path(out)))
    return result


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
    run_export = import_named("tunesmith.commands.export.run:run_export")
    result: ExportResult = run_export(settings, out_dir=Path(out), push=push, is_public=is_public)
    return result


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
    selection = StageSelection(only=only, start_from=start_from, is_rerun=is_rerun)
    result: PipelineResult = import_named("tunesmith.commands.run.run:run_pipeline")(settings, selection=selection)
    return result
