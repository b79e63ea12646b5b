"""Features of CrewAI."""

from __future__ import annotations

import os

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")

import litellm
from cases import ADD_TWICE, ANSWER, Case, write_call
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

from tunesmith import WorkflowOutput


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build_agent(model, *, is_stream: bool = False, **fields) -> Agent:
    name = f"openai/{model.model_name}"
    litellm.register_model({name: {"litellm_provider": "openai", "mode": "chat", "supports_function_calling": True}})
    llm = LLM(name, is_litellm=True, base_url=model.base_url, api_key=model.api_key, stream=is_stream)
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


async def stream(task, model):
    return WorkflowOutput(response=(await build_agent(model, is_stream=True).kickoff_async(task["question"])).raw)


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
    Case(feature="streaming", workflow=stream, replies=(ANSWER,), num_turns=1, num_branches=0),
    Case(feature="retries", workflow=retry, replies=("It is 6.", ANSWER), num_turns=2, num_branches=1),
)  # fmt: skip
ABSENT = {
    "structured": "fails in CrewAI 1.15.30, which calls LiteLLM without the agent's key",
    "compaction": "not run: it summarizes in parts that are larger than the pocket model's context",
}
