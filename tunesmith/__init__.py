"""Tunesmith trains the model inside any LLM agent by reinforcement learning.

`tune` takes a workflow (the agent), a judge (the reward) and tasks, and returns where the trained model is. The public
names are imported on first access (PEP 562), so `import tunesmith` and `tunesmith --help` do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tunesmith.version import __version__ as __version__

if TYPE_CHECKING:
    from tunesmith.algorithms.advantages.group import RunOutcome
    from tunesmith.algorithms.scores import TokenLosses, TokenScores
    from tunesmith.api import (
        collect_conversations,
        evaluate,
        export,
        measure_pass_rates,
        prefer,
        prepare,
        run_pipeline,
        serve,
        sft,
        tune,
    )
    from tunesmith.commands.check.run import check
    from tunesmith.commands.doctor.diagnose import diagnose as doctor
    from tunesmith.commands.eval.comparison import EvalResult
    from tunesmith.commands.export.run import ExportResult
    from tunesmith.commands.pass_rate import PassRates
    from tunesmith.commands.prepare.run import PrepareResult
    from tunesmith.commands.run.config import PipelineConfig
    from tunesmith.commands.run.folder import PipelineResult, StageOutcome
    from tunesmith.commands.select_model.judges import avg_time_judge, avg_token_consumption_judge
    from tunesmith.commands.select_model.select import ModelSelection, select_model
    from tunesmith.commands.sft.train import OfflineResult
    from tunesmith.commands.tune.callbacks import CheckpointEnd, EvaluationEnd, StepEnd, Stop
    from tunesmith.commands.tune.tune import TuneResult
    from tunesmith.commands.tune_prompt.prompt_runs import PromptTuneResult
    from tunesmith.commands.tune_prompt.tune import tune_prompt
    from tunesmith.compat.agentscope_config import (
        AlgorithmConfig,
        DatasetConfig,
        PromptTuneConfig,
        TaskSelectorConfig,
        TinkerConfig,
        TunerModelConfig,
    )
    from tunesmith.config import EvalConfig, ExportSection, PreferenceConfig, PrepareSection, RunConfig, SftConfig
    from tunesmith.model.prepare import prepare_model
    from tunesmith.monitor.metric_table import MetricTable
    from tunesmith.rollout.chat_model import ChatModel
    from tunesmith.rollout.signature import check_judge_function, check_workflow_function
    from tunesmith.tool_log import replayable
    from tunesmith.types import JudgeOutput, JudgeType, WorkflowOutput, WorkflowType

MODULES = {
    "tunesmith.algorithms.advantages.group": ("RunOutcome",),
    "tunesmith.algorithms.scores": ("TokenLosses", "TokenScores"),
    "tunesmith.commands.check.run": ("check",),
    "tunesmith.commands.doctor.diagnose": ("diagnose",),
    "tunesmith.commands.eval.comparison": ("EvalResult",),
    "tunesmith.commands.export.run": ("ExportResult",),
    "tunesmith.commands.pass_rate": ("PassRates",),
    "tunesmith.commands.prepare.run": ("PrepareResult",),
    "tunesmith.commands.run.config": ("PipelineConfig",),
    "tunesmith.commands.run.folder": ("PipelineResult", "StageOutcome"),
    "tunesmith.commands.select_model.judges": ("avg_time_judge", "avg_token_consumption_judge"),
    "tunesmith.commands.select_model.select": ("ModelSelection", "select_model"),
    "tunesmith.commands.sft.train": ("OfflineResult",),
    "tunesmith.commands.tune.callbacks": ("CheckpointEnd", "EvaluationEnd", "StepEnd", "Stop"),
    "tunesmith.commands.tune.tune": ("TuneResult",),
    "tunesmith.commands.tune_prompt.prompt_runs": ("PromptTuneResult",),
    "tunesmith.commands.tune_prompt.tune": ("tune_prompt",),
    "tunesmith.compat.agentscope_config": (
        "AlgorithmConfig", "DatasetConfig", "PromptTuneConfig", "TaskSelectorConfig", "TinkerConfig",
        "TunerModelConfig",
    ),
    "tunesmith.config": (
        "EvalConfig", "ExportSection", "PreferenceConfig", "PrepareSection", "RunConfig", "SftConfig",
    ),
    "tunesmith.model.prepare": ("prepare_model",),
    "tunesmith.monitor.metric_table": ("MetricTable",),
    "tunesmith.rollout.chat_model": ("ChatModel",),
    "tunesmith.rollout.signature": ("check_judge_function", "check_workflow_function"),
    "tunesmith.tool_log": ("replayable",),
    "tunesmith.types": ("JudgeOutput", "JudgeType", "WorkflowOutput", "WorkflowType"),
}  # fmt: skip
"""Where each public name is; `tunesmith.api` has the others."""
RENAMED = {"doctor": "diagnose"}
"""Public name -> the name in its module, where they differ."""

__all__ = [
    "AlgorithmConfig", "ChatModel", "CheckpointEnd", "DatasetConfig", "EvalConfig", "EvalResult", "EvaluationEnd",
    "ExportResult", "ExportSection", "JudgeOutput", "JudgeType", "MetricTable", "ModelSelection", "OfflineResult",
    "PassRates", "PipelineConfig", "PipelineResult", "PreferenceConfig", "PrepareResult", "PrepareSection",
    "PromptTuneConfig", "PromptTuneResult", "RunConfig", "RunOutcome", "SftConfig", "StageOutcome", "StepEnd", "Stop",
    "TaskSelectorConfig", "TinkerConfig", "TokenLosses", "TokenScores", "TuneResult", "TunerModelConfig",
    "WorkflowOutput", "WorkflowType", "avg_time_judge", "avg_token_consumption_judge", "check", "check_judge_function",
    "check_workflow_function", "collect_conversations", "doctor", "evaluate", "export", "measure_pass_rates", "prefer",
    "prepare", "prepare_model", "replayable", "run_pipeline", "select_model", "serve", "sft", "tune", "tune_prompt",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        own = RENAMED.get(name, name)
        module = next((module for module, names in MODULES.items() if own in names), "tunesmith.api")
        return getattr(importlib.import_module(module), own)
    raise AttributeError(f"module 'tunesmith' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
