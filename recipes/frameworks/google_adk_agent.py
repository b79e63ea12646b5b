"""An agent of Google's ADK, through LiteLLM and HTTP (`rollout.http_port`)."""

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part

from tunesmith import JudgeOutput, WorkflowOutput


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def workflow(task, model):
    chat = LiteLlm(model=f"openai/{model.model_name}", api_base=model.base_url, api_key=model.api_key)
    agent = LlmAgent(name="calculator", model=chat, instruction="Answer the question.", tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="calculator")
    session = await runner.session_service.create_session(app_name="calculator", user_id="user")
    question = Content(role="user", parts=[Part(text=task["question"])])
    text = ""
    try:
        async for event in runner.run_async(user_id="user", session_id=session.id, new_message=question):
            if event.is_final_response() and event.content:
                text = "".join(part.text or "" for part in event.content.parts)
    except ValueError as error:  # the model called an unknown tool
        return WorkflowOutput(response=f"failed: {error}")
    return WorkflowOutput(response=text)


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response))
