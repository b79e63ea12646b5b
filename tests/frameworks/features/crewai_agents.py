"""Features of CrewAI."""

from __future__ import annotations

import os

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")

import litellm
from cases import ADD, ADD_TWICE, ANSWER, Case, write_call
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel

from tunesmith import WorkflowOutput


class Sum(BaseModel):
    answer: int


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build_agent(model, llm_options: dict | None = None, **fields) -> Agent:
    name = f"openai/{model.model_name}"
    abilities = dict.fromkeys(("supports_function_calling", "supports_response_schema"), True)
    litellm.register_model({name: {"litellm_provider": "openai", "mode": "chat"} | abilities})
    llm = LLM(name, is_litellm=True, base_url=model.base_url, api_key=model.api_key, **llm_options or {})
    options = {"role": "calculator", "goal": "Answer.", "backstory": "You add.", "tools": [add], "max_iter": 4}
    return Agent(**{"llm": llm} | options | fields)


async def delegate(task, model):
    boss = build_agent(model, tools=[], allow_delegation=True)
    helper = build_agent(model, role="helper")
    job = Task(description=task["question"], expected_output="A number.", agent=boss)
    crew = Crew(agents=[boss, helper], tasks=[job])
    return WorkflowOutput(response=(await crew.kickoff_async()).raw)


async def call_twice(task, model):
    return WorkflowOutput(response=(await build_agent(model).kickoff_async(task["question"])).raw)


async def parse(task, model):
    agent = build_agent(model, tools=[], llm_options={"response_format": Sum})
    result = await agent.kickoff_async(task["question"])
    return WorkflowOutput(response=str(Sum.model_validate_json(result.raw).answer))


async def stream(task, model):
    agent = build_agent(model, llm_options={"stream": True})
    job = Task(description=task["question"], expected_output="A number.", agent=agent)
    return WorkflowOutput(response=(await Crew(agents=[agent], tasks=[job]).kickoff_async()).raw)


async def summarize(task, model):
    agent = build_agent(model, llm_options={"context_window_size": 1000})
    return WorkflowOutput(response=(await agent.kickoff_async(task["question"] + " Be careful." * 400)).raw)


async def retry(task, model):
    def check(output):
        return ("5" in output.raw, output.raw if "5" in output.raw else "Try again.")

    agent = build_agent(model, tools=[])
    job = Task(description=task["question"], expected_output="A number.", agent=agent, guardrail=check)
    return WorkflowOutput(response=(await Crew(agents=[agent], tasks=[job]).kickoff_async()).raw)


DELEGATE = write_call("delegate_work_to_coworker", task="2 + 3?", context="None.", coworker="helper")
CASES = (
    Case(feature="sub_agents", workflow=delegate, replies=(DELEGATE, "It is 5.", ANSWER), num_turns=3, num_branches=1),
    Case(feature="parallel_calls", workflow=call_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse, replies=('{"answer": 5}',), num_turns=1, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(feature="retries", workflow=retry, replies=("It is 6.", ANSWER), num_turns=2, num_branches=1),
    Case(feature="compaction", workflow=summarize, replies=(ADD, *2 * ("<summary>2 + 3?</summary>",), ANSWER),
         num_turns=4, num_branches=3),
)  # fmt: skip
ABSENT: dict[str, str] = {}
