"""The demo's agent: AgentScope's ReActAgent with a calculator, as a user would write it, and its judge.

`build_demonstrations` writes down how good conversations go, with the very system prompt and tool schema that the agent
sends. The demonstrators are right where the pocket model, imitating them, cannot be: it has no head for sums. That the
tool pays everywhere is left to reinforcement learning.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase
from agentscope.tool import Toolkit, ToolResponse

from tunesmith.judges.numeric import judge_number
from tunesmith.tasks.arithmetic import Problem
from tunesmith.tools import calculator
from tunesmith.types import JudgeOutput, WorkflowOutput

SYSTEM_PROMPT = "Use the tool."
SHARE_WITHOUT_TOOL: Mapping[int, float] = {1: 0.75, 2: 0.35, 3: 0.1}
"""Number of operations -> share of the demonstrations that do not use the tool."""
MAX_ITERATIONS = 3
"""Model calls of one run; one to compute and one to answer is enough."""


def calculate(expression: str) -> ToolResponse:
    """Compute an arithmetic expression.

    Args:
        expression (`str`):
            Numbers with + - * / and parentheses.
    """
    return ToolResponse(content=[TextBlock(type="text", text=calculator.calculate(expression))])


def build_toolkit() -> Toolkit:
    toolkit = Toolkit()
    toolkit.register_tool_function(calculate)
    return toolkit


async def solve_problem(task: Mapping[str, Any], model: ChatModelBase) -> WorkflowOutput:
    """The workflow: ask the agent, return its last message."""
    agent = ReActAgent(
        name="solver",
        sys_prompt=SYSTEM_PROMPT,
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=build_toolkit(),
        max_iters=MAX_ITERATIONS,
    )
    agent.set_console_output_enabled(False)
    return WorkflowOutput(response=await agent.reply(Msg("user", task["question"], role="user")))


async def judge_answer(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """The judge: 1.0 for the right final number."""
    return await judge_number(task, response)


def build_demonstrations(
    problems: Sequence[Problem], *, seed: int, share_without_tool: Mapping[int, float] = SHARE_WITHOUT_TOOL
) -> list[dict[str, Any]]:
    """Rows to fine-tune on: the easier a problem, the oftener it is answered from the head, as people do."""
    rng = random.Random(f"demonstrations-{seed}")
    return [
        _build_direct_answer(problem)
        if rng.random() < share_without_tool[problem.num_operations]
        else _build_tool_answer(problem)
        for problem in problems
    ]


def _build_direct_answer(problem: Problem) -> dict[str, Any]:
    return _build_row(problem, [])


def _build_tool_answer(problem: Problem) -> dict[str, Any]:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": calculate.__name__, "arguments": {"expression": problem.expression}},
    }
    used: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": problem.answer},
    ]
    return _build_row(problem, used)


def _build_row(problem: Problem, before_answer: Sequence[dict[str, Any]]) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem.question},
        *before_answer,
        {"role": "assistant", "content": f"The answer is {problem.answer}."},
    ]
    return {"messages": messages, "tools": build_toolkit().get_json_schemas()}
