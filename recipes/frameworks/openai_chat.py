"""An agent on the OpenAI SDK: chat completions with a tool."""

import json

from tunesmith import JudgeOutput, WorkflowOutput

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def add(arguments):
    try:
        return str(sum(json.loads(arguments).values()))
    except (TypeError, ValueError) as error:
        return f"Error: {error}"


async def workflow(task, model):
    client = model.as_openai_client()
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        completion = await client.chat.completions.create(model=model.model_name, messages=messages, tools=[ADD])
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        calls = [(call.id, call.function.arguments) for call in message.tool_calls]
        messages += [{"role": "tool", "tool_call_id": key, "content": add(arguments)} for key, arguments in calls]
    return WorkflowOutput(response=message.content)


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in (response or "")))
