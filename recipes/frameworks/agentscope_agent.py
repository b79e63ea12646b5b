"""An agent of AgentScope 2.x, `Agent`; `model` is AgentScope's OpenAIChatModel (`rollout.chat_model: agentscope`)."""

from agentscope.agent import Agent
from agentscope.message import UserMsg
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit

from tunesmith import JudgeOutput, WorkflowOutput


async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a (int): The first number.
        b (int): The second number.
    """
    return str(a + b)


async def workflow(task, model):
    agent = Agent(
        name="calculator",
        system_prompt="Answer the question.",
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(add)]),
        state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS)),
    )
    return WorkflowOutput(response=await agent.reply(UserMsg("user", task["question"])))


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in (response.get_text_content() or "")))
