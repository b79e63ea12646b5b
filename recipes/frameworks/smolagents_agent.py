"""Agents of smolagents, which is synchronous: a tool-calling agent and a code agent."""

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from tunesmith import JudgeOutput, WorkflowOutput


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class PolicyModel(OpenAIModel):
    def __init__(self, model):
        self._policy = model
        super().__init__(model_id=model.model_name, api_key=model.api_key)

    def create_client(self):
        return self._policy.as_sync_openai_client()


def workflow(task, model):
    agent = ToolCallingAgent(tools=[add], model=PolicyModel(model), max_steps=4, verbosity_level=0)
    return WorkflowOutput(response=str(agent.run(task["question"])))


def code_workflow(task, model):
    agent = CodeAgent(tools=[add], model=PolicyModel(model), max_steps=4, verbosity_level=0)
    return WorkflowOutput(response=str(agent.run(task["question"])))


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response))
