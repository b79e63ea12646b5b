"""A ReAct agent with a calculator, and its judge: the agent of the demo, as a user would write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.tool import Toolkit, ToolResponse

from tunesmith import JudgeOutput, WorkflowOutput
from tunesmith.judges.numeric import judge_number
from tunesmith.tools import calculator


def calculate(expression: str) -> ToolResponse:
    """Compute an arithmetic expression.

    Args:
        expression (`str`):
            Numbers with + - * / and parentheses.
    """
    return ToolResponse(content=[TextBlock(type="text", text=calculator.calculate(expression))])


async def solve(task: Mapping[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    """Ask the agent and return its last message."""
    toolkit = Toolkit()
    toolkit.register_tool_function(calculate)
    agent = ReActAgent(
        name="solver",
        sys_prompt="Use the tool.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        max_iters=3,
    )
    agent.set_console_output_enabled(False)
    return WorkflowOutput(response=await agent.reply(Msg("user", task["question"], role="user")))


async def judge(task: Mapping[str, Any], response: Msg) -> JudgeOutput:
    """Reward 1.0 for the correct final number, else 0.0."""
    return await judge_number(task, response)
