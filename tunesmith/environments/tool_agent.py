"""`tool_agent`: the workflow of an environment, for training, evaluation and pass rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.environments.environment import Environment
from tunesmith.environments.transcript import Transcript, find_format_error
from tunesmith.types import WorkflowOutput


async def tool_agent(task: Mapping[str, Any], model: Any, environment: Environment) -> WorkflowOutput:
    """Answer `task["question"]`, with those tools of the environment that `task["tools"]` names, or all of them.

    The response is the transcript; the reward is the judge's.
    """
    environment = environment.for_task(task)
    transcript = await environment.run(str(task["question"]), model)
    return WorkflowOutput(response=transcript, metrics=collect_metrics(transcript, environment))


def collect_metrics(transcript: Transcript, environment: Environment) -> dict[str, float]:
    """The recorded counts of a rollout, as the reward operators and the tables read them."""
    counts = transcript.tool_counts
    rate = {"failed_call_rate": transcript.failed_calls / len(transcript.calls)} if transcript.calls else {}
    return {
        "tool_calls": float(len(transcript.calls)),
        **{f"{name}_calls": float(counts.get(name, 0)) for name in environment.tools},
        "failed_calls": float(transcript.failed_calls),
        "refused_calls": float(transcript.refused_calls),
        "format": float(find_format_error(transcript) is None),
        "answered": float(transcript.finish == "answered"),
        **rate,
    }
