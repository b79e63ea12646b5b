"""Built-in judges of `select_model`: by time and by tokens; a higher reward is better, so the reward is negative.

Their arguments are those of AgentScope's judges: a task, which is not used, and the response with the metrics of the
run, `{"response": ..., "metrics": {"execution_time": ..., "total_tokens": ...}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.types import JudgeOutput


async def avg_time_judge(_task: dict[str, Any], response: Any) -> JudgeOutput:
    """Reward: minus the seconds that the workflow took, `metrics["execution_time"]`."""
    seconds = read_metrics(response).get("execution_time")
    if seconds is None:
        raise ValueError("Missing 'execution_time' field in metrics")
    return JudgeOutput(reward=-seconds, metrics={"avg_time_seconds": seconds})


async def avg_token_consumption_judge(_task: dict[str, Any], response: Any) -> JudgeOutput:
    """Reward: minus the tokens that the workflow used, `metrics["total_tokens"]`, or those of `metrics["usage"]`."""
    metrics = read_metrics(response)
    usage = metrics.get("usage", metrics)
    if not isinstance(usage, Mapping):
        raise ValueError("Usage field in response.metrics is not a dictionary")
    counts = [usage[name] for name in ("total_tokens", "output_tokens") if usage.get(name) is not None]
    if not counts:
        raise ValueError(
            "the tokens of the run are unknown: the model's replies state no usage, or the workflow calls the model "
            "in another way than model(...)"
        )
    return JudgeOutput(reward=-float(counts[0]), metrics={"token_consumed": float(counts[0])})


def read_metrics(response: Any) -> Mapping[str, Any]:
    if not isinstance(response, Mapping):
        raise ValueError("Response must be a dict with 'response' and 'metrics' keys")
    metrics = response.get("metrics")
    if metrics is None:
        raise ValueError("Missing 'metrics' field in response")
    return dict(metrics)
