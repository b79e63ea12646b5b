"""Features of the Anthropic SDK."""

from __future__ import annotations

from anthropic import beta_async_tool
from cases import ADD, ADD_TWICE, ANSWER, Case, Hanging
from pydantic import BaseModel

from tunesmith import WorkflowOutput


class Sum(BaseModel):
    answer: int


@beta_async_tool
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def read_text(message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def build_fields(task, model) -> dict:
    return {
        "model": model.model_name,
        "max_tokens": 300,
        "messages": [{"role": "user", "content": task["question"]}],
    }


async def call_twice(task, model):
    client = model.as_anthropic_client()
    message = await client.beta.messages.tool_runner(**build_fields(task, model), tools=[add]).until_done()
    return WorkflowOutput(response=read_text(message))


async def parse(task, model):
    client = model.as_anthropic_client()
    message = await client.messages.parse(**build_fields(task, model), output_format=Sum)
    return WorkflowOutput(response=str(message.parsed_output.answer))


async def stream(task, model):
    client, texts = model.as_anthropic_client(), []
    runner = client.beta.messages.tool_runner(**build_fields(task, model), tools=[add], stream=True)
    async for events in runner:
        async for event in events:
            texts += [event.text] if event.type == "text" else []
    assert len(texts) > 1
    return WorkflowOutput(response="".join(texts))


async def time_out(task, model):
    client = model.as_anthropic_client().with_options(timeout=2.0, max_retries=1)
    return WorkflowOutput(response=read_text(await client.messages.create(**build_fields(task, model))))


CASES = (
    Case(feature="parallel_calls", workflow=call_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse, replies=('{"answer": 5}',), num_turns=1, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(feature="retries", workflow=time_out, replies=(Hanging(text="The"), ANSWER), num_turns=2, num_branches=1),
)
ABSENT = {"sub_agents": "", "compaction": "runs on Anthropic's servers; the endpoint refuses it"}
