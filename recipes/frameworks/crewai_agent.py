"""An agent of CrewAI, through LiteLLM and HTTP (`rollout.http_port`)."""

import os

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")  # CrewAI reports to its makers otherwise

import litellm
from crewai import LLM, Agent
from crewai.tools import tool

from tunesmith import JudgeOutput, WorkflowOutput


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def workflow(task, model):
    name = f"openai/{model.model_name}"
    litellm.register_model({name: {"litellm_provider": "openai", "mode": "chat", "supports_function_calling": True}})
    llm = LLM(name, is_litellm=True, base_url=model.base_url, api_key=model.api_key)
    agent = Agent(
        role="calculator", goal="Answer the question.", backstory="You add numbers.", tools=[add], llm=llm, max_iter=5
    )
    try:
        result = await agent.kickoff_async(task["question"])
    except ValueError as error:  # the model's reply was empty
        return WorkflowOutput(response=f"failed: {error}")
    return WorkflowOutput(response=result.raw)


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response))
