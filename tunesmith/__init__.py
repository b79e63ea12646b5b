"""Tunesmith trains the model inside any LLM agent by reinforcement learning.

`tune` takes a workflow (the agent), a judge (the reward) and tasks, and returns where the trained model is. The public
names are imported on first access (PEP 562), so `import tunesmith` and `tunesmith --help` do not import torch.
"""

# ruff: noqa: F405  # most names of `__all__` are those of a star import
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tunesmith.version import __version__ as __version__

if TYPE_CHECKING:
    from tunesmith.api import *  # noqa: F403  # the names of its `__all__`
    from tunesmith.commands.run.config import PipelineConfig
    from tunesmith.config import EvalConfig, ExportSection, PreferenceConfig, PrepareSection, RunConfig, SftConfig

MODULES = {
    "tunesmith.types": ("JudgeOutput", "JudgeType", "WorkflowOutput", "WorkflowType"),
    "tunesmith.tool_log": ("replayable",),
    "tunesmith.rollout.signature": ("check_judge_function", "check_workflow_function"),
    "tunesmith.monitor.metric_table": ("MetricTable",),
    "tunesmith.config": (
        "EvalConfig", "ExportSection", "PreferenceConfig", "PrepareSection", "RunConfig", "SftConfig",
    ),
    "tunesmith.commands.run.config": ("PipelineConfig",),
    "tunesmith.compat.agentscope_config": (
        "AlgorithmConfig", "DatasetConfig", "PromptTuneConfig", "TaskSelectorConfig", "TunerModelConfig",
    ),
    "tunesmith.compat.tinker_config": ("TinkerConfig",),
    "tunesmith.commands.select_model.judges": ("avg_time_judge", "avg_token_consumption_judge"),
}  # fmt: skip
"""Names whose modules import neither torch nor transformers; the other names are imported with `tunesmith.api`."""

__all__ = [
    "AlgorithmConfig",
    "ChatModel",
    "CheckpointEnd",
    "DatasetConfig",
    "EvalConfig",
    "EvalResult",
    "EvaluationEnd",
    "ExportResult",
    "ExportSection",
    "JudgeOutput",
    "JudgeType",
    "MetricTable",
    "ModelSelection",
    "OfflineResult",
    "PassRates",
    "PipelineConfig",
    "PipelineResult",
    "PreferenceConfig",
    "PrepareResult",
    "PrepareSection",
    "PromptTuneConfig",
    "PromptTuneResult",
    "RunConfig",
    "RunOutcome",
    "SftConfig",
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


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = next((module for module, names in MODULES.items() if name in names), "tunesmith.api")
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'tunesmith' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
