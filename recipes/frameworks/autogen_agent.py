"""An agent of AutoGen, `AssistantAgent`."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import BaseOpenAIChatCompletionClient

from tunesmith import JudgeOutput, WorkflowOutput

MODEL = ModelInfo(
    vision=False,
    function_calling=True,
    json_output=True,
    structured_output=True,
    multiple_system_messages=True,
    family="unknown",
)


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def workflow(task, model):
    chat = BaseOpenAIChatCompletionClient(
        model.as_openai_client(), create_args={"model": model.model_name}, model_info=MODEL
    )
    agent = AssistantAgent(
        "calculator", chat, tools=[add], system_message="Answer the question.", max_tool_iterations=4
    )
    result = await agent.run(task=task["question"])
    return WorkflowOutput(response=result.messages[-1].to_text())


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response))
