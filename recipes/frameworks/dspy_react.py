"""A program of DSPy, `ReAct`, through LiteLLM and HTTP (`rollout.http_port`)."""

import dspy
from dspy.utils.exceptions import AdapterParseError

from tunesmith import JudgeOutput, WorkflowOutput


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def workflow(task, model):
    lm = dspy.LM(
        f"openai/{model.model_name}",
        api_base=model.base_url,
        api_key=model.api_key,
        temperature=1.0,
        max_tokens=256,
        cache=False,  # each rollout must sample
        num_retries=0,
    )
    agent = dspy.ReAct("question -> answer", tools=[add], max_iters=4)
    with dspy.context(lm=lm):
        try:
            prediction = await agent.acall(question=task["question"])
        except AdapterParseError as error:  # the reply lacks a field
            return WorkflowOutput(response=f"failed: {error}")
    return WorkflowOutput(response=str(prediction.answer))


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response))
