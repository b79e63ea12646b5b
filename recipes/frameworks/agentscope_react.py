"""A `ReActAgent` of AgentScope 1.x; `model` is AgentScope's own class (`rollout.chat_model: agentscope`)."""

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse

from tunesmith import JudgeOutput, WorkflowOutput


def add(a: int, b: int) -> ToolResponse:
    """Add two numbers.

    Args:
        a (int): The first number.
        b (int): The second number.
    """
    return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])


async def workflow(task, model):
    toolkit = Toolkit()
    toolkit.register_tool_function(add)
    agent = ReActAgent(
        name="calculator",
        sys_prompt="Answer the question.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
        max_iters=4,
    )
    agent.set_console_output_enabled(False)
    return WorkflowOutput(response=await agent.reply(Msg("user", task["question"], role="user")))


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in (response.get_text_content() or "")))
