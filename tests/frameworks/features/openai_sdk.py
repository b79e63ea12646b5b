"""Features of the OpenAI SDK, on chat completions and on the Responses API."""

from __future__ import annotations

import json

from cases import ADD, ADD_TWICE, ANSWER, Case, Hanging
from pydantic import BaseModel

from tunesmith import WorkflowOutput

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD_TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}
ADD_FUNCTION = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}


class Sum(BaseModel):
    answer: int


def add(arguments: str) -> str:
    return str(sum(json.loads(arguments).values()))


async def call_twice(task, model):
    client = model.as_openai_client()
    messages = [{"role": "user", "content": task["question"]}]
    reply = await client.chat.completions.create(model=model.model_name, messages=messages, tools=[ADD_TOOL])
    calls = reply.choices[0].message.tool_calls
    assert len(calls) == 2
    messages.append(reply.choices[0].message)
    messages += [{"role": "tool", "tool_call_id": each.id, "content": add(each.function.arguments)} for each in calls]
    reply = await client.chat.completions.create(model=model.model_name, messages=messages, tools=[ADD_TOOL])
    return WorkflowOutput(response=reply.choices[0].message.content)


async def parse_sum(task, model):
    client = model.as_openai_client()
    reply = await client.chat.completions.parse(
        model=model.model_name, messages=[{"role": "user", "content": task["question"]}], response_format=Sum
    )
    return WorkflowOutput(response=str(reply.choices[0].message.parsed.answer))


async def stream(task, model):
    client = model.as_openai_client()
    messages = [{"role": "user", "content": task["question"]}]
    for num_texts in (0, 2):
        texts = []
        async with client.chat.completions.stream(
            model=model.model_name, messages=messages, tools=[ADD_TOOL]
        ) as events:
            async for event in events:
                texts += [event.delta] if event.type == "content.delta" else []
            message = (await events.get_final_completion()).choices[0].message
        assert len(texts) >= num_texts
        messages.append({"role": "assistant", "content": message.content, "tool_calls": [
            {"id": each.id, "type": "function", "function": {"name": "add", "arguments": each.function.arguments}}
            for each in message.tool_calls or ()
        ]})  # fmt: skip
        messages += [
            {"role": "tool", "tool_call_id": each.id, "content": add(each.function.arguments)}
            for each in message.tool_calls or ()
        ]
    return WorkflowOutput(response="".join(texts))


async def time_out(task, model):
    client = model.as_openai_client().with_options(timeout=2.0, max_retries=1)
    messages = [{"role": "user", "content": task["question"]}]
    reply = await client.chat.completions.create(model=model.model_name, messages=messages)
    return WorkflowOutput(response=reply.choices[0].message.content)


CASES = (
    Case(feature="parallel_calls", workflow=call_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse_sum, replies=('{"answer": 5}',), num_turns=1, num_branches=0),
    Case(feature="streaming", workflow=stream, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(feature="retries", workflow=time_out, replies=(Hanging(text="The"), ANSWER), num_turns=2, num_branches=1),
)
ABSENT = {"sub_agents": "", "compaction": ""}


async def respond_twice(task, model):
    client = model.as_openai_client()
    response = await client.responses.create(
        model=model.model_name, input=task["question"], tools=[ADD_FUNCTION], parallel_tool_calls=True
    )
    calls = [item for item in response.output if item.type == "function_call"]
    assert len(calls) == 2
    items = [{"type": "function_call_output", "call_id": each.call_id, "output": add(each.arguments)} for each in calls]
    response = await client.responses.create(
        model=model.model_name, input=items, tools=[ADD_FUNCTION], previous_response_id=response.id
    )
    return WorkflowOutput(response=response.output_text)


async def parse_response(task, model):
    client = model.as_openai_client()
    response = await client.responses.parse(model=model.model_name, input=task["question"], text_format=Sum)
    return WorkflowOutput(response=str(response.output_parsed.answer))


async def stream_response(task, model):
    client = model.as_openai_client()
    items, previous = task["question"], None
    for num_texts in (0, 2):
        texts = []
        async with client.responses.stream(
            model=model.model_name, input=items, tools=[ADD_FUNCTION], previous_response_id=previous
        ) as events:
            async for event in events:
                texts += [event.delta] if event.type == "response.output_text.delta" else []
            response = await events.get_final_response()
        assert len(texts) >= num_texts
        items, previous = [], response.id
        items += [
            {"type": "function_call_output", "call_id": each.call_id, "output": add(each.arguments)}
            for each in response.output
            if each.type == "function_call"
        ]
    return WorkflowOutput(response="".join(texts))


async def time_out_response(task, model):
    client = model.as_openai_client().with_options(timeout=2.0, max_retries=1)
    response = await client.responses.create(model=model.model_name, input=task["question"])
    return WorkflowOutput(response=response.output_text)


RESPONSES_CASES = (
    Case(feature="parallel_calls", workflow=respond_twice, replies=(ADD_TWICE, ANSWER), num_turns=2, num_branches=0),
    Case(feature="structured", workflow=parse_response, replies=('{"answer": 5}',), num_turns=1, num_branches=0),
    Case(feature="streaming", workflow=stream_response, replies=(ADD, ANSWER), num_turns=2, num_branches=0),
    Case(
        feature="retries", workflow=time_out_response, replies=(Hanging(text="The"), ANSWER),
        num_turns=2, num_branches=1,
    ),
)  # fmt: skip
RESPONSES_ABSENT = {
    "sub_agents": "",
    "compaction": "`responses.compact` and `truncation: auto` run on OpenAI's servers; the endpoint refuses them",
}
