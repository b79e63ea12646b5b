"""Features of the OpenAI Agents SDK, on chat completions and on the Responses API."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from agents import (
    Agent,
    ModelRetrySettings,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    retry_policies,
    set_tracing_disabled,
)
from agents.extensions.tool_output_trimmer import ToolOutputTrimmer
from cases import ADD, ADD_TWICE, ANSWER, Case, Hanging, write_call
from pydantic import BaseModel

from tunesmith import WorkflowOutput

set_tracing_disabled(True)
CHAT, RESPONSES = OpenAIChatCompletionsModel, OpenAIResponsesModel


class Sum(BaseModel):
    answer: int


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@function_tool
def read() -> str:
    """Read a long text."""
    return "long " * 200


def build_agent(model, kind: Callable, **fields) -> Agent:
    chat = kind(model.model_name, openai_client=model.as_openai_client())
    return Agent(**{"name": "calculator", "instructions": "Answer.", "model": chat, "tools": [add]} | fields)


async def run(task, model, kind: Callable, **fields):
    result = await Runner.run(build_agent(model, kind, **fields), task["question"], max_turns=4)
    return WorkflowOutput(response=str(result.final_output))


async def hand_off(task, model, kind: Callable):
    helper = build_agent(model, kind, name="helper", instructions="Help.", tools=[])
    asking = helper.as_tool(tool_name="ask_helper", tool_description="Ask the helper.")
    adder = build_agent(model, kind, name="adder", instructions="Add.", tools=[add, asking])
    return await run(task, model, kind, handoffs=[adder])


async def call_twice(task, model, kind: Callable):
    return await run(task, model, kind)


async def parse(task, model, kind: Callable):
    return await run(task, model, kind, output_type=Sum)


async def stream(task, model, kind: Callable):
    result = Runner.run_streamed(build_agent(model, kind), task["question"])
    events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    assert sum(event.type == "response.output_text.delta" for event in events) > 1
    return WorkflowOutput(response=result.final_output)


async def retry(task, model, kind: Callable):
    retries = ModelRetrySettings(max_retries=1, policy=retry_policies.network_error())
    chat = kind(model.model_name, openai_client=model.as_openai_client().with_options(timeout=2.0))
    agent = build_agent(model, kind).clone(model=chat, model_settings=ModelSettings(retry=retries))
    return WorkflowOutput(response=(await Runner.run(agent, task["question"])).final_output)


async def trim(task, model, kind: Callable):
    agent = build_agent(model, kind, tools=[read])
    trimmer = RunConfig(call_model_input_filter=ToolOutputTrimmer(recent_turns=1))
    result = await Runner.run(agent, "Read the text.", run_config=trimmer)
    items = [*result.to_input_list(), {"role": "user", "content": task["question"]}]
    result = await Runner.run(agent, items, run_config=trimmer)
    return WorkflowOutput(response=result.final_output)


def build_cases(kind: Callable) -> tuple[Case, ...]:
    handed_over = (write_call("transfer_to_adder"), write_call("ask_helper", input="2 + 3?"), "It is 5.", ANSWER)
    return (
        Case(feature="sub_agents", workflow=partial(hand_off, kind=kind), replies=handed_over,
             num_turns=4, num_branches=2),
        Case(feature="parallel_calls", workflow=partial(call_twice, kind=kind), replies=(ADD_TWICE, ANSWER),
             num_turns=2, num_branches=0),
        Case(feature="structured", workflow=partial(parse, kind=kind), replies=(ADD, '{"answer":5}'),
             num_turns=2, num_branches=0),
        Case(feature="streaming", workflow=partial(stream, kind=kind), replies=(ADD, ANSWER),
             num_turns=2, num_branches=0),
        Case(feature="retries", workflow=partial(retry, kind=kind), replies=(Hanging(text="The"), ADD, ANSWER),
             num_turns=3, num_branches=1),
        Case(feature="compaction", workflow=partial(trim, kind=kind), replies=(write_call("read"), "Done.", ANSWER),
             num_turns=3, num_branches=1),
    )  # fmt: skip


CASES, RESPONSES_CASES = build_cases(CHAT), build_cases(RESPONSES)
ABSENT: dict[str, str] = {}
