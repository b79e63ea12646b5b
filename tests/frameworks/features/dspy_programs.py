"""Features of DSPy."""

from __future__ import annotations

import dspy
from cases import Case

from tunesmith import WorkflowOutput


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def read() -> str:
    """Read a long text."""
    return "long " * 500


def build_lm(model) -> dspy.LM:
    options = {"temperature": 1.0, "max_tokens": 256, "cache": False, "num_retries": 0}
    return dspy.LM(f"openai/{model.model_name}", api_base=model.base_url, api_key=model.api_key, **options)


async def ask_helper(task, model):
    helper = dspy.Predict("question -> answer")

    async def ask(question: str) -> str:
        """Ask the helper."""
        return (await helper.acall(question=question)).answer

    with dspy.context(lm=build_lm(model)):
        prediction = await dspy.ReAct("question -> answer", tools=[ask]).acall(question=task["question"])
    return WorkflowOutput(response=prediction.answer)


async def call_twice(task, model):
    choose = dspy.Predict("question, tools: list[dspy.Tool] -> calls: dspy.ToolCalls")
    with dspy.context(lm=build_lm(model)):
        prediction = await choose.acall(question=task["question"], tools=[dspy.Tool(add)])
    calls = prediction.calls.tool_calls
    assert len(calls) == 2
    return WorkflowOutput(response=str(add(**calls[0].args)))


async def parse(task, model):
    with dspy.context(lm=build_lm(model), adapter=dspy.JSONAdapter()):
        prediction = await dspy.Predict("question -> answer: int").acall(question=task["question"])
    return WorkflowOutput(response=str(prediction.answer))


async def stream(task, model):
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
    chunks = []
    with dspy.context(lm=build_lm(model)):
        async for value in program(question=task["question"]):
            chunks += [value.chunk] if isinstance(value, dspy.streaming.StreamResponse) else []
    assert len(chunks) > 1
    return WorkflowOutput(response="".join(chunks))


async def retry(task, model):
    with dspy.context(lm=build_lm(model)):
        prediction = await dspy.Predict("question -> answer: int").acall(question=task["question"])
    return WorkflowOutput(response=str(prediction.answer))


async def truncate(task, model):
    with dspy.context(lm=build_lm(model)):
        prediction = await dspy.ReAct("question -> answer", tools=[read]).acall(question=task["question"])
    return WorkflowOutput(response=prediction.answer)


def write_step(tool: str, arguments: str = "{}") -> str:
    fields = (("next_thought", "Yes."), ("next_tool_name", tool), ("next_tool_args", arguments), ("completed", ""))
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in fields)


ANSWER = "[[ ## answer ## ]]\n5\n\n[[ ## completed ## ]]"
REASONED = f"[[ ## reasoning ## ]]\nIt is 5.\n\n{ANSWER}"
CALL = '{"name": "add", "args": {"a": 2, "b": 3}}'
CALLS = f'[[ ## calls ## ]]\n{{"tool_calls": [{CALL}, {CALL}]}}\n\n[[ ## completed ## ]]'
ASK, READ, FINISH = write_step("ask", '{"question": "2 + 3?"}'), write_step("read"), write_step("finish")
CASES = (
    Case(feature="sub_agents", workflow=ask_helper, replies=(ASK, ANSWER, FINISH, REASONED),
         num_turns=4, num_branches=3),
    Case(feature="parallel_calls", workflow=call_twice, replies=(CALLS,), num_turns=1, num_branches=0),
    Case(feature="structured", workflow=parse, replies=('{"answer": 5}',), num_turns=1, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=("[[ ## answer ## ]]\nIt is the 5.\n\n[[ ## completed ## ]]",),
         num_turns=1, num_branches=0),
    Case(feature="retries", workflow=retry, replies=("Five.", '{"answer": 5}'), num_turns=2, num_branches=1),
    Case(feature="compaction", workflow=truncate, replies=(*4 * (READ,), FINISH, FINISH, REASONED),
         num_turns=6, num_branches=5),  # the fifth call is refused: the context is full
)  # fmt: skip
ABSENT: dict[str, str] = {}
