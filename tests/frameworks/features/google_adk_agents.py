"""Features of Google's ADK."""

from __future__ import annotations

from cases import ADD, ADD_TWICE, ANSWER, Case, write_call
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.apps.app import App, EventsCompactionConfig
from google.adk.apps.llm_event_summarizer import LlmEventSummarizer
from google.adk.models.lite_llm import LiteLlm
from google.adk.plugins.reflect_retry_tool_plugin import ReflectAndRetryToolPlugin
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part
from pydantic import BaseModel

from tunesmith import WorkflowOutput


class Sum(BaseModel):
    answer: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    if a < 0:
        raise ValueError("a is negative")
    return a + b


def build_chat(model) -> LiteLlm:
    return LiteLlm(model=f"openai/{model.model_name}", api_base=model.base_url, api_key=model.api_key)


def build_agent(model, **fields) -> LlmAgent:
    options = {"name": "calculator", "model": build_chat(model), "instruction": "Answer.", "tools": [add]}
    return LlmAgent(**options | fields)


async def run(agent, *questions, config=None, **fields):
    app = App(name="calculator", root_agent=agent, **fields)
    runner = InMemoryRunner(app=app)
    session = await runner.session_service.create_session(app_name="calculator", user_id="user")
    texts, events = [], []
    for question in questions:
        message = Content(role="user", parts=[Part(text=question)])
        arguments = {"user_id": "user", "session_id": session.id, "new_message": message}
        async for event in runner.run_async(**arguments, **({} if config is None else {"run_config": config})):
            events.append(event)
            if event.is_final_response() and event.content:
                texts.append("".join(part.text or "" for part in event.content.parts))
    assert config is None or sum(bool(event.partial) for event in events) > 1
    return WorkflowOutput(response=texts[-1])


async def hand_off(task, model):
    adder = build_agent(model, name="adder", description="Adds.", instruction="Add.")
    return await run(build_agent(model, tools=[], sub_agents=[adder]), task["question"])


async def call_twice(task, model):
    return await run(build_agent(model), task["question"])


async def parse(task, model):
    return await run(build_agent(model, tools=[], output_schema=Sum), task["question"])


async def stream(task, model):
    return await run(build_agent(model), task["question"], config=RunConfig(streaming_mode=StreamingMode.SSE))


async def retry(task, model):
    return await run(build_agent(model), task["question"], plugins=[ReflectAndRetryToolPlugin(max_retries=1)])


async def compact(task, model):
    config = EventsCompactionConfig(
        summarizer=LlmEventSummarizer(llm=build_chat(model)), compaction_interval=1, overlap_size=0
    )
    return await run(build_agent(model), "Hello", task["question"], events_compaction_config=config)


CASES = (
    Case(feature="sub_agents", workflow=hand_off,
         replies=(write_call("transfer_to_agent", agent_name="adder"), ADD, ANSWER), num_turns=3, num_branches=1),
    Case(feature="parallel_calls", workflow=call_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse, replies=('{"answer": 5}',), num_turns=1, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(feature="retries", workflow=retry, replies=(write_call("add", a=-2, b=3), ADD, ANSWER),
         num_turns=3, num_branches=0),
    Case(feature="compaction", workflow=compact, replies=("Hello", "The user says hello.", ANSWER, "The sum."),
         num_turns=4, num_branches=3),
)  # fmt: skip
ABSENT: dict[str, str] = {}
