"""Validation of a stage before the first one runs: functions, data sets, models, and packages for trackers and plots.

Settings that reference an earlier stage are skipped here, because their files may not exist yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tunesmith.commands.eval.compare import find_model
from tunesmith.commands.eval.comparison_plot import check_plot
from tunesmith.commands.eval.suites import apply_suite
from tunesmith.commands.export.gguf.files import check_packages
from tunesmith.commands.run.plan import PlannedStage, list_strings, read_reference
from tunesmith.config import (
    DatasetSection,
    EnvironmentSection,
    EvalConfig,
    ExportSection,
    FlywheelConfig,
    FunctionStage,
    ModelSection,
    OfflineConfig,
    ParetoSection,
    PrepareSection,
    RftFilterSection,
    RunConfig,
    SourceSection,
)
from tunesmith.errors import TunesmithError
from tunesmith.et_agent.flywheel.crew import load_role_functions
from tunesmith.et_agent.selection.diversity import check_embedding_model
from tunesmith.monitor.trackers import check_trackers
from tunesmith.rollout.signature import check_judge_function, check_workflow_function
from tunesmith.runs.load_function import load_environment, load_function, load_functions
from tunesmith.runs.policy import check_policy
from tunesmith.tasks.load import load_preview


def check_stage(stage: PlannedStage) -> None:
    """Raise if a stage is invalid; the error names the stage."""
    try:
        check_settings(stage)
    except (TunesmithError, ValueError) as error:
        error.args = (f"stages.{stage.name}: {error}", *error.args[1:])
        raise


def check_settings(stage: PlannedStage) -> None:
    settings = stage.resolve(lambda reference: f"stage:{reference.stage}/{reference.file or ''}".rstrip("/"))
    if isinstance(settings, EvalConfig):
        models = {label: find_model(path) for label, path in settings.models.items()}
        check_run(apply_suite(settings.to_run_config(), settings.suite), models=models)
        if settings.has_plot:
            check_plot()
    elif isinstance(settings, RunConfig):
        check_run(settings, models={"model.path": settings.model.path})
        check_trackers(settings.monitor.trackers)
    elif isinstance(settings, OfflineConfig):
        check_models(settings.model, [settings.model.path])
        check_trackers(settings.monitor.trackers)
    elif isinstance(settings, PrepareSection):
        check_source(settings.data, default_split="train")
        if settings.eval_data is not None:
            check_source(settings.eval_data, default_split="test")
    elif isinstance(settings, ParetoSection):
        check_file(settings.data)
    elif isinstance(settings, RftFilterSection):
        check_embedding_model(settings.embedding_model)
        for path in settings.paths:
            check_file(path)
        if settings.environment is not None:
            load_environment(drop_pending_tools(settings.environment))
    elif isinstance(settings, FlywheelConfig):
        check_run(settings.to_run_config(), models={"model.path": settings.model.path})
        load_role_functions(settings)
    elif isinstance(settings, ExportSection):
        check_packages(settings)
    elif isinstance(settings, FunctionStage):
        load_function(settings.function, knob="function")


def check_run(config: RunConfig, *, models: Mapping[str, str]) -> None:
    environment = drop_pending_tools(config.environment)
    workflow, judge = load_functions(config.model_copy(update={"environment": environment}))
    check_workflow_function(workflow, allows_sync=True)
    if judge is not None:
        check_judge_function(judge)
    check_models(config.model, models.values())
    check_data([*config.training_sets.values(), *config.eval_datasets.values()])


def drop_pending_tools(section: EnvironmentSection) -> EnvironmentSection:
    """The section without tools whose settings name outputs of stages, which cannot be built before those have run."""
    tools = [
        each
        for each in section.tools
        if not any(read_reference(text) is not None for text in list_strings(each.settings))
    ]
    return section.model_copy(update={"tools": tuple(tools)})


def check_models(section: ModelSection, paths: Iterable[str]) -> None:
    if section.base_path is not None and read_reference(section.base_path) is not None:
        return
    for path in paths:
        if read_reference(path) is None:
            check_policy(section.model_copy(update={"path": path}))


def check_data(datasets: Iterable[DatasetSection]) -> None:
    for dataset in datasets:
        if read_reference(dataset.path) is None:
            load_preview(dataset.path, name=dataset.name, split=dataset.split, num_rows=1)


def check_file(path: str) -> None:
    """Raise if rows that are not the output of an earlier stage cannot be read."""
    if read_reference(path) is None:
        load_preview(path, name=None, split="train", num_rows=1)


def check_source(source: SourceSection, *, default_split: str) -> None:
    if read_reference(source.path) is None:
        is_file = Path(source.path).expanduser().is_file()
        split = source.split or (None if is_file else default_split)
        load_preview(source.path, name=source.name, split=split, num_rows=1)
