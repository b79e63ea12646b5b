"""Features of AutoGen."""

from __future__ import annotations

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent
from autogen_agentchat.teams import Swarm
from autogen_core.model_context import BufferedChatCompletionContext
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import BaseOpenAIChatCompletionClient
from cases import ADD, ADD_TWICE, ANSWER, Case, Hanging, write_call
from pydantic import BaseModel

from tunesmith import WorkflowOutput

CAPABILITIES = ("function_calling", "json_output", "structured_output", "multiple_system_messages")
MODEL = ModelInfo(vision=False, family="unknown", **dict.fromkeys(CAPABILITIES, True))


class Sum(BaseModel):
    answer: int


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build_agent(model, client=None, **fields) -> AssistantAgent:
    chat = BaseOpenAIChatCompletionClient(
        client or model.as_openai_client(), create_args={"model": model.model_name}, model_info=MODEL
    )
    options = {"name": "calculator", "system_message": "Answer.", "tools": [add], "max_tool_iterations": 4}
    return AssistantAgent(model_client=chat, **options | fields)


async def run(agent, task):
    return WorkflowOutput(response=(await agent.run(task=task["question"])).messages[-1].to_text())


async def hand_off(task, model):
    adder = build_agent(model, name="adder", system_message="Add.")
    team = Swarm(
        [build_agent(model, handoffs=["adder"]), adder], termination_condition=TextMentionTermination("sum is")
    )
    return await run(team, task)


async def call_twice(task, model):
    return await run(build_agent(model), task)


async def parse(task, model):
    return await run(build_agent(model, tools=None, output_content_type=Sum), task)


async def stream(task, model):
    agent = build_agent(model, model_client_stream=True)
    events = [event async for event in agent.run_stream(task=task["question"])]
    texts = [event.content for event in events if isinstance(event, ModelClientStreamingChunkEvent)]
    assert len(texts) > 1
    return WorkflowOutput(response="".join(texts))


async def time_out(task, model):
    client = model.as_openai_client().with_options(timeout=2.0, max_retries=1)
    return await run(build_agent(model, client), task)


async def forget(task, model):
    agent = build_agent(model, model_context=BufferedChatCompletionContext(buffer_size=2))
    await agent.run(task="Hello")
    return await run(agent, task)


CASES = (
    Case(feature="sub_agents", workflow=hand_off, replies=(write_call("transfer_to_adder"), ADD, ANSWER),
         num_turns=3, num_branches=1),
    Case(feature="parallel_calls", workflow=call_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse, replies=('{"answer": 5}',), num_turns=1, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(feature="retries", workflow=time_out, replies=(Hanging(text="The"), ADD, ANSWER),
         num_turns=3, num_branches=1),
    Case(feature="compaction", workflow=forget, replies=("Hello", ANSWER), num_turns=2, num_branches=1),
)  # fmt: skip
ABSENT: dict[str, str] = {}
