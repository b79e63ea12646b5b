"""Run a workflow and its judge once, with an ordinary chat model, before any training.

    BASE_URL=http://localhost:8000/v1 MODEL=my-model API_KEY=... python main.py

Works with any OpenAI-compatible server. The functions can be passed to `tune()` unchanged.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import ChatModelBase, OpenAIChatModel

from tunesmith import JudgeOutput, WorkflowOutput

TASK = {"question": "What is 123 plus 456?", "answer": "579"}


async def example_workflow_function(
    task: Mapping[str, Any],
    model: ChatModelBase,
    auxiliary_models: Mapping[str, ChatModelBase] | None = None,
) -> WorkflowOutput:
    """Ask a ReAct agent and return its reply."""
    agent = ReActAgent(
        name="react_agent",
        sys_prompt="You are an agent that is good at solving math problems.",
        model=model,
        formatter=OpenAIChatFormatter(),
    )
    response = await agent.reply(msg=Msg("user", task["question"], role="user"))
    return WorkflowOutput(response=response)


async def example_judge_function(
    task: Mapping[str, Any],
    response: Any,
    auxiliary_models: Mapping[str, ChatModelBase] | None = None,
) -> JudgeOutput:
    """Reward 1.0 when the reply contains the reference answer, else 0.0."""
    return JudgeOutput(reward=1.0 if task["answer"] in response.get_text_content() else 0.0)


async def try_once(model: ChatModelBase) -> JudgeOutput:
    """Run the workflow and the judge on one task; print the response and the reward."""
    output = await example_workflow_function(TASK, model)
    assert isinstance(output.response, Msg), "this workflow returns the agent's message"
    print("workflow response:", output.response.get_text_content())
    judged = await example_judge_function(TASK, output.response)
    print("judge reward:", judged.reward)
    return judged


def build_model() -> OpenAIChatModel:
    """The chat model named by the environment variables MODEL, BASE_URL and API_KEY."""
    return OpenAIChatModel(
        model_name=os.environ["MODEL"],
        api_key=os.environ.get("API_KEY", "EMPTY"),
        client_kwargs={"base_url": os.environ["BASE_URL"]},
        stream=False,
    )


if __name__ == "__main__":
    asyncio.run(try_once(build_model()))
