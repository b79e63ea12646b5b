"""Features of AgentScope 2.x, `Agent`."""

from __future__ import annotations

from agentscope.agent import Agent, ContextConfig, ModelConfig
from agentscope.message import UserMsg
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, Toolkit
from cases import ADD, ADD_TWICE, ANSWER, Case, Hanging, write_call
from pydantic import BaseModel

from tunesmith import WorkflowOutput


class Sum(BaseModel):
    """The sum."""

    answer: int


async def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a (int): The first number.
        b (int): The second number.
    """
    return str(a + b)


def build_agent(model, *tools, **fields) -> Agent:
    return Agent(
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(each) for each in tools or (add,)]),
        state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS)),
        **{"name": "calculator", "system_prompt": "Answer."} | fields,
    )


async def run(agent, task):
    return WorkflowOutput(response=await agent.reply(UserMsg("user", task["question"])))


async def ask_helper(task, model):
    helper = build_agent(model, system_prompt="Add.")

    async def ask(question: str) -> str:
        """Ask the helper.

        Args:
            question (str): The question.
        """
        return (await helper.reply(UserMsg("user", question))).get_text_content()

    return await run(build_agent(model, ask), task)


async def call_twice(task, model):
    return await run(build_agent(model), task)


async def parse(task, model):
    answer = await build_agent(model).reply(UserMsg("user", task["question"]), structured_schema=Sum)
    return WorkflowOutput(response=str(answer))


async def stream(task, model):
    model.stream = True
    events = [event async for event in build_agent(model).reply_stream(UserMsg("user", task["question"]))]
    texts = [event.delta for event in events if type(event).__name__ == "TextBlockDeltaEvent"]
    assert len(texts) > 1
    return WorkflowOutput(response="".join(texts))


async def retry(task, model):
    model.client = model.client.with_options(timeout=2.0)
    return await run(build_agent(model, model_config=ModelConfig(max_retries=1)), task)


async def summarize(task, model):
    agent = build_agent(model)
    await agent.reply(UserMsg("user", "long " * 1500))
    agent.context_config = ContextConfig(trigger_ratio=0.2, reserve_ratio=0.01, context_buffer_ratio=0.1)
    return await run(agent, task)


SUMMARY = write_call("generate_structured_output", **dict.fromkeys(
    ("task_overview", "current_state", "important_discoveries", "next_steps", "context_to_preserve"), "5"
))  # fmt: skip
CASES = (
    Case(feature="sub_agents", workflow=ask_helper, replies=(write_call("ask", question="2 + 3?"), ADD, "5", ANSWER),
         num_turns=4, num_branches=1),
    Case(feature="parallel_calls", workflow=call_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse, replies=(ADD, write_call("GenerateStructuredOutput", answer=5)),
         num_turns=2, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(feature="retries", workflow=retry, replies=(Hanging(text="The"), ADD, ANSWER), num_turns=3, num_branches=1),
    Case(feature="compaction", workflow=summarize, replies=("Noted.", SUMMARY, ANSWER), num_turns=3,
         num_branches=2),
)  # fmt: skip
ABSENT: dict[str, str] = {}
