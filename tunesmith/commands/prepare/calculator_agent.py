"""The agent that the pipeline prepares data for, trains and evaluates: it answers one question with a calculator.

It is a tool agent (`tunesmith.environments`) whose environment is fixed. Demonstrations begin with the messages of its
rollouts, so that fine-tuning and sampling use the same prompt. Errors of the model are returned to it as tool results
that begin with "Error:".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunesmith.config import EnvironmentSection
from tunesmith.environments.environment import Environment
from tunesmith.judges.transcript import read_transcript
from tunesmith.tools.calculator import CALCULATOR_TOOL, build_calculator_tool
from tunesmith.types import WorkflowOutput

SYSTEM_PROMPT = (
    "Solve the math problem. Think inside <think></think> and let the calculator compute every calculation. "
    "End with one line: #### and the final number."
)
TOOLS = (CALCULATOR_TOOL,)
MAX_CALLS = 16
"""Limit per rollout; the longest solutions of GSM8K need ten."""
ENVIRONMENT = Environment(
    EnvironmentSection(protocol="native", system_prompt=SYSTEM_PROMPT, max_calls=MAX_CALLS), [build_calculator_tool()]
)


async def calculator_agent(task: Mapping[str, Any], model: Any) -> WorkflowOutput:
    """Call the model and execute its tool calls until it answers without one or a limit is reached.

    The metrics are the numbers of calculator calls, and of those answered with an error.
    """
    transcript = await ENVIRONMENT.run(task["question"], model)
    results = [each for each in transcript.segments if each.kind == "result"]
    metrics = {"tool_calls": float(len(results)), "tool_errors": float(sum(not each.ok for each in results))}
    return WorkflowOutput(response=read_transcript(transcript), metrics=metrics)
