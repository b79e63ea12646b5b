"""Features of AgentScope 1.x, `ReActAgent`."""

from __future__ import annotations

import json

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.token import CharTokenCounter
from agentscope.tool import Toolkit, ToolResponse
from cases import ADD, ADD_TWICE, ANSWER, Case, write_call
from pydantic import BaseModel

from tunesmith import WorkflowOutput


class Sum(BaseModel):
    answer: int


def add(a: int, b: int) -> ToolResponse:
    """Add two numbers.

    Args:
        a (int): The first number.
        b (int): The second number.
    """
    return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])


def build_agent(model, *tools, **fields) -> ReActAgent:
    toolkit = Toolkit()
    for each in tools or (add,):
        toolkit.register_tool_function(each)
    options = {"name": "calculator", "sys_prompt": "Answer.", "max_iters": 4}
    agent = ReActAgent(model=model, formatter=OpenAIChatFormatter(), toolkit=toolkit, **options | fields)
    agent.set_console_output_enabled(False)
    return agent


async def run(agent, task, **options):
    return WorkflowOutput(response=await agent.reply(Msg("user", task["question"], role="user"), **options))


async def ask_helper(task, model):
    helper = build_agent(model, sys_prompt="Add.")

    async def ask(question: str) -> ToolResponse:
        """Ask the helper.

        Args:
            question (str): The question.
        """
        answer = await helper.reply(Msg("user", question, role="user"))
        return ToolResponse(content=answer.get_content_blocks("text"))

    return await run(build_agent(model, ask), task)


async def call_twice(task, model):
    return await run(build_agent(model, parallel_tool_calls=True), task)


async def parse(task, model):
    answer = await build_agent(model).reply(Msg("user", task["question"], role="user"), structured_model=Sum)
    return WorkflowOutput(response=str(answer.metadata["answer"]))


async def stream(task, model):
    model.stream = True
    return await run(build_agent(model), task)


async def summarize(task, model):
    config = ReActAgent.CompressionConfig(
        enable=True, agent_token_counter=CharTokenCounter(), trigger_threshold=20, keep_recent=1
    )
    return await run(build_agent(model, compression_config=config), task)


SUMMARY = json.dumps(dict.fromkeys(
    ("task_overview", "current_state", "important_discoveries", "next_steps", "context_to_preserve"), "5"
))  # fmt: skip
CASES = (
    Case(feature="sub_agents", workflow=ask_helper, replies=(write_call("ask", question="2 + 3?"), ADD, "5", ANSWER),
         num_turns=4, num_branches=1),
    Case(feature="parallel_calls", workflow=call_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse, replies=(ADD, write_call("generate_response", answer=5), ANSWER),
         num_turns=3, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(feature="compaction", workflow=summarize, replies=(ADD, SUMMARY, ANSWER), num_turns=3, num_branches=2),
)  # fmt: skip
ABSENT = {"retries": ""}
