"""Features of pydantic-ai."""

from __future__ import annotations

from cases import ADD, ADD_TWICE, ANSWER, Case, write_call
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, NativeOutput
from pydantic_ai.capabilities import ProcessHistory
from pydantic_ai.messages import ModelRequest
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tunesmith import WorkflowOutput


class Sum(BaseModel):
    answer: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build_agent(model, **fields) -> Agent:
    chat = OpenAIChatModel(model.model_name, provider=OpenAIProvider(openai_client=model.as_openai_client()))
    return Agent(chat, **{"instructions": "Answer.", "tools": [add]} | fields)


async def ask_helper(task, model):
    helper = build_agent(model, instructions="Add.")

    async def ask(question: str) -> str:
        """Ask the helper."""
        return (await helper.run(question)).output

    return WorkflowOutput(response=(await build_agent(model, tools=[ask]).run(task["question"])).output)


async def call_twice(task, model):
    return WorkflowOutput(response=(await build_agent(model).run(task["question"])).output)


async def parse(task, model):
    agent = build_agent(model, output_type=NativeOutput(Sum))
    return WorkflowOutput(response=str((await agent.run(task["question"])).output.answer))


async def stream(task, model):
    async with build_agent(model).run_stream(task["question"]) as result:
        texts = [text async for text in result.stream_text(delta=True, debounce_by=None)]
    assert len(texts) > 1
    return WorkflowOutput(response="".join(texts))


async def retry(task, model):
    agent = build_agent(model, output_type=Sum)

    @agent.output_validator
    def check(output: Sum) -> Sum:
        if output.answer != 5:
            raise ModelRetry("Try again.")
        return output

    return WorkflowOutput(response=str((await agent.run(task["question"])).output.answer))


async def summarize(task, model):
    writer = build_agent(model, instructions="Summarize.", tools=[])

    async def shorten(messages: list) -> list:
        if len(messages) < 5:
            return messages
        summary = await writer.run("Summarize the conversation.", message_history=messages[:3])
        return [ModelRequest.user_text_prompt(f"{task['question']} {summary.output}"), *messages[-2:]]

    agent = build_agent(model, capabilities=[ProcessHistory(shorten)])
    return WorkflowOutput(response=(await agent.run(task["question"])).output)


WRONG, RIGHT = write_call("final_result", answer=6), write_call("final_result", answer=5)
CASES = (
    Case(feature="sub_agents", workflow=ask_helper, replies=(write_call("ask", question="2 + 3?"), ADD, "5", ANSWER),
         num_turns=4, num_branches=1),
    Case(feature="parallel_calls", workflow=call_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse, replies=(ADD, '{"answer":5}'), num_turns=2, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(feature="retries", workflow=retry, replies=(WRONG, RIGHT), num_turns=2, num_branches=0),
    Case(feature="compaction", workflow=summarize, replies=(ADD, ADD, "A sum was computed.", ANSWER),
         num_turns=4, num_branches=2),
)  # fmt: skip
ABSENT: dict[str, str] = {}
