"""The demo's agent, AgentScope's ReActAgent with a calculator as a user would write it, and its judge.

`build_demonstrations` writes correct conversations with the system prompt and tool schema that the agent sends. Some of
them answer without the tool, which a model as small as the pocket model cannot imitate correctly: it cannot do the
arithmetic itself. Reinforcement learning then has to find that calling the tool is better for every problem.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.model import ChatModelBase
from agentscope.tool import Toolkit, ToolResponse

from tunesmith.judges.numeric import judge_number
from tunesmith.tasks.arithmetic import Problem, build_problems
from tunesmith.tasks.load import write_rows
from tunesmith.tools import calculator
from tunesmith.types import JudgeOutput, WorkflowOutput

SYSTEM_PROMPT = "Use the tool."
SHARE_WITHOUT_TOOL: Mapping[int, float] = {1: 0.75, 2: 0.35, 3: 0.1}
"""Number of operations -> fraction of the demonstrations that answer without the tool."""
MAX_ITERATIONS = 3
"""Limit of model calls per rollout; one tool call and one answer suffice."""


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
    """The workflow: the agent's reply to the question."""
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
    """The judge: reward 1.0 for the correct final number."""
    return await judge_number(task, response)


def save_demonstrations(out_dir: Path, *, number: int, seed: int) -> None:
    problems = build_problems("train", num_problems=number, seed=seed)
    write_rows(out_dir / "rows.jsonl", build_demonstrations(problems, seed=seed))


def build_demonstrations(
    problems: Sequence[Problem], *, seed: int, share_without_tool: Mapping[int, float] = SHARE_WITHOUT_TOOL
) -> list[dict[str, Any]]:
    """Rows for fine-tuning; the easier a problem, the more often it is answered without the tool."""
    rng = random.Random(f"demonstrations-{seed}")
    return [
        build_demonstration(problem, calls_tool=rng.random() >= share_without_tool[problem.num_operations])
        for problem in problems
    ]


def build_demonstration(problem: Problem, *, calls_tool: bool) -> dict[str, Any]:
    """One conversation, with a call of the calculator or without."""
    arguments = {"expression": problem.expression}
    call = {"id": "call_1", "type": "function", "function": {"name": calculate.__name__, "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": problem.answer},
        {"role": "assistant", "content": f"The answer is {problem.answer}."},
    ]
    if not calls_tool:
        del messages[2:4]
    return {"messages": messages, "tools": build_toolkit().get_json_schemas()}
