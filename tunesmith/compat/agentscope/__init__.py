"""Drop-in for `agentscope.tuner` 1.0.21: the same names, on the engine, trainer and statistics of Tunesmith.

`import tunesmith.compat.agentscope as tuner` replaces `from agentscope import tuner`. The names are those of the public
API, imported on first access, so this module is on the API's layer. DSPy is imported only by `tune_prompt`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunesmith import (
        AlgorithmConfig,
        DatasetConfig,
        JudgeOutput,
        JudgeType,
        PromptTuneConfig,
        TinkerConfig,
        TunerModelConfig,
        WorkflowOutput,
        WorkflowType,
        check_judge_function,
        check_workflow_function,
        select_model,
        tune,
        tune_prompt,
    )

__all__ = [
    "AlgorithmConfig",
    "DatasetConfig",
    "JudgeOutput",
    "JudgeType",
    "PromptTuneConfig",
    "TinkerConfig",
    "TunerModelConfig",
    "WorkflowOutput",
    "WorkflowType",
    "check_judge_function",
    "check_workflow_function",
    "select_model",
    "tune",
    "tune_prompt",
]
FORMER_NAMES = {"TunerChatModel": "TunerModelConfig", "Algorithm": "AlgorithmConfig", "Dataset": "DatasetConfig"}
"""Names of classes in earlier versions of AgentScope."""


def __getattr__(name: str) -> Any:
    if name in __all__ or name in FORMER_NAMES:
        return getattr(importlib.import_module("tunesmith"), FORMER_NAMES.get(name, name))
    if name in ("model_selection", "prompt_tune"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *FORMER_NAMES])
