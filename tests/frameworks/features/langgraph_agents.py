"""Features of LangGraph, with the agents and middleware of langchain."""

from __future__ import annotations

from cases import ADD, ADD_TWICE, ANSWER, Case, Hanging, write_call
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware, SummarizationMiddleware
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tunesmith import WorkflowOutput


class Sum(BaseModel):
    answer: int


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build_chat(model, **fields) -> ChatOpenAI:
    client = model.as_openai_client().with_options(**fields) if fields else model.as_openai_client()
    return ChatOpenAI(
        model=model.model_name,
        api_key=model.api_key,
        async_client=client.chat.completions,
        root_async_client=client,
    )


async def run(agent, task) -> dict:
    return await agent.ainvoke({"messages": [("user", task["question"])]})


async def ask_helper(task, model):
    chat = build_chat(model)
    helper = create_agent(chat, [add], system_prompt="Add.")

    @tool
    async def ask(question: str) -> str:
        """Ask the helper."""
        return (await helper.ainvoke({"messages": [("user", question)]}))["messages"][-1].text

    state = await run(create_agent(chat, [ask], system_prompt="Answer."), task)
    return WorkflowOutput(response=state["messages"][-1].text)


async def call_twice(task, model):
    state = await run(create_agent(build_chat(model), [add]), task)
    assert sum(message.type == "tool" for message in state["messages"]) == 2
    return WorkflowOutput(response=state["messages"][-1].text)


async def parse(task, model):
    agent = create_agent(build_chat(model), [add], response_format=ProviderStrategy(Sum))
    return WorkflowOutput(response=str((await run(agent, task))["structured_response"].answer))


async def stream(task, model):
    agent = create_agent(build_chat(model), [add])
    chunks = [
        message.text
        async for message, _ in agent.astream({"messages": [("user", task["question"])]}, stream_mode="messages")
        if message.type == "AIMessageChunk" and message.text
    ]
    assert len(chunks) > 1
    return WorkflowOutput(response="".join(chunks))


async def retry(task, model):
    chat = build_chat(model, timeout=2.0)
    agent = create_agent(chat, [add], middleware=[ModelRetryMiddleware(max_retries=1, initial_delay=0.01)])
    return WorkflowOutput(response=(await run(agent, task))["messages"][-1].text)


async def summarize(task, model):
    chat = build_chat(model)
    middleware = SummarizationMiddleware(chat, trigger=("messages", 4), keep=("messages", 2))
    agent = create_agent(chat, [add], middleware=[middleware])
    return WorkflowOutput(response=(await run(agent, task))["messages"][-1].text)


CASES = (
    Case(feature="sub_agents", workflow=ask_helper, replies=(write_call("ask", question="2 + 3?"), ADD, "5", ANSWER),
         num_turns=4, num_branches=1),
    Case(feature="parallel_calls", workflow=call_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse, replies=(ADD, '{"answer":5}'), num_turns=2, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(feature="retries", workflow=retry, replies=(Hanging(text="The"), ADD, ANSWER), num_turns=3, num_branches=1),
    Case(feature="compaction", workflow=summarize, replies=(ADD, ADD, "A sum was computed.", ANSWER),
         num_turns=4, num_branches=2),
)  # fmt: skip
ABSENT: dict[str, str] = {}
