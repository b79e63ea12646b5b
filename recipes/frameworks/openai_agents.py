"""An agent of the OpenAI Agents SDK, on chat completions or on the Responses API."""

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException

from tunesmith import JudgeOutput, WorkflowOutput

set_tracing_disabled(True)  # the SDK exports traces to OpenAI otherwise


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def workflow(task, model):
    chat = OpenAIChatCompletionsModel(model.model_name, openai_client=model.as_openai_client())
    return await run(task, chat)


async def responses_workflow(task, model):
    return await run(task, OpenAIResponsesModel(model.model_name, openai_client=model.as_openai_client()))


async def run(task, model):
    agent = Agent(name="calculator", instructions="Answer the question.", model=model, tools=[add])
    try:
        result = await Runner.run(agent, task["question"], max_turns=4)
    except AgentsException as error:  # the model called an unknown tool, or ran out of turns
        return WorkflowOutput(response=f"failed: {error}")
    return WorkflowOutput(response=result.final_output)


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response))
