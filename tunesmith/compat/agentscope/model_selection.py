"""The names of `agentscope.tuner.model_selection`."""

from __future__ import annotations

from tunesmith import avg_time_judge, avg_token_consumption_judge, select_model

__all__ = ["avg_time_judge", "avg_token_consumption_judge", "select_model"]
