"""Features of smolagents, of its tool-calling and its code agent."""

from __future__ import annotations

from cases import ADD, ADD_TWICE, Case, write_call
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from tunesmith import WorkflowOutput


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    if a < 0:
        raise ValueError("a is negative")
    return a + b


class PolicyModel(OpenAIModel):
    def __init__(self, model):
        self._policy = model
        super().__init__(model_id=model.model_name, api_key=model.api_key)

    def create_client(self):
        return self._policy.as_sync_openai_client()


def build_agent(model, kind=ToolCallingAgent, **fields):
    options = {"tools": [add], "model": PolicyModel(model), "max_steps": 4, "verbosity_level": 0}
    return kind(**options | fields)


def call_tools(task, model):
    return WorkflowOutput(response=str(build_agent(model).run(task["question"])))


def ask_helper(task, model):
    helper = build_agent(model, name="helper", description="Adds.")
    return WorkflowOutput(response=str(build_agent(model, tools=[], managed_agents=[helper]).run(task["question"])))


def stream(task, model):
    return stream_agent(build_agent(model, stream_outputs=True), task)


def stream_agent(agent, task):
    events = list(agent.run(task["question"], stream=True))
    assert sum(type(event).__name__ == "ChatMessageStreamDelta" for event in events) > 2
    return WorkflowOutput(response=str(events[-1].output))


def run_code(task, model):
    return WorkflowOutput(response=str(build_agent(model, CodeAgent).run(task["question"])))


def ask_helper_in_code(task, model):
    helper = build_agent(model, CodeAgent, name="helper", description="Adds.")
    agent = build_agent(model, CodeAgent, tools=[], managed_agents=[helper])
    return WorkflowOutput(response=str(agent.run(task["question"])))


def run_structured_code(task, model):
    agent = build_agent(model, CodeAgent, use_structured_outputs_internally=True)
    return WorkflowOutput(response=str(agent.run(task["question"])))


def stream_code(task, model):
    return stream_agent(build_agent(model, CodeAgent, stream_outputs=True), task)


FINAL = write_call("final_answer", answer="5")
CASES = (
    Case(feature="sub_agents", workflow=ask_helper, replies=(write_call("helper", task="2 + 3?"), FINAL, FINAL),
         num_turns=3, num_branches=2),
    Case(feature="parallel_calls", workflow=call_tools, replies=(ADD_TWICE, FINAL), num_turns=2, num_branches=1),
    Case(feature="streaming", workflow=stream, replies=(ADD, FINAL), num_turns=2, num_branches=1),
    Case(feature="retries", workflow=call_tools, replies=(write_call("add", a=-2, b=3), FINAL),
         num_turns=2, num_branches=1),
)  # fmt: skip
ABSENT = {"structured": "", "compaction": ""}

ADDING = "Thought: add\n<code>\nprint(add(2, 3))\n</code>"
FINAL_CODE = "Thought: done\n<code>\nfinal_answer(5)\n</code>"
HELPING = 'Thought: ask\n<code>\nprint(helper("2 + 3?"))\n</code>'
STRUCTURED = '{"thought": "done", "code": "final_answer(5)"}'
CODE_CASES = (
    Case(feature="sub_agents", workflow=ask_helper_in_code, replies=(HELPING, FINAL_CODE, FINAL_CODE),
         num_turns=3, num_branches=1),
    Case(feature="structured", workflow=run_structured_code, replies=(STRUCTURED,), num_turns=1, num_branches=0),
    Case(feature="streaming", workflow=stream_code, replies=(ADDING, FINAL_CODE), num_turns=2, num_branches=0),
    Case(feature="retries", workflow=run_code, replies=("Thought: add\n<code>\nmultiply(2)\n</code>", FINAL_CODE),
         num_turns=2, num_branches=0),
)  # fmt: skip
CODE_ABSENT = {"parallel_calls": "calls are lines of code", "compaction": ""}
