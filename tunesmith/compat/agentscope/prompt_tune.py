"""The names of `agentscope.tuner.prompt_tune`."""

from __future__ import annotations

from tunesmith import PromptTuneConfig, tune_prompt

__all__ = ["PromptTuneConfig", "tune_prompt"]
