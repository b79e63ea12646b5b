"""An agent of pydantic-ai."""

from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from tunesmith import JudgeOutput, WorkflowOutput


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def workflow(task, model):
    chat = OpenAIChatModel(model.model_name, provider=OpenAIProvider(openai_client=model.as_openai_client()))
    agent = Agent(chat, instructions="Answer the question.", tools=[add])
    try:
        result = await agent.run(task["question"], usage_limits=UsageLimits(request_limit=4))
    except AgentRunError as error:  # the model's reply was invalid, or it made too many requests
        return WorkflowOutput(response=f"failed: {error}")
    return WorkflowOutput(response=result.output)


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response))
