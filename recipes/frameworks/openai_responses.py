"""An agent on the OpenAI SDK: the Responses API with a tool."""

import json

from tunesmith import JudgeOutput, WorkflowOutput

ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def add(arguments):
    try:
        return str(sum(json.loads(arguments).values()))
    except (TypeError, ValueError) as error:
        return f"Error: {error}"


async def workflow(task, model):
    client = model.as_openai_client()
    items, previous = [{"role": "user", "content": task["question"]}], None
    for _ in range(4):
        response = await client.responses.create(
            model=model.model_name, input=items, tools=[ADD], previous_response_id=previous
        )
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            break
        items = [{"type": "function_call_output", "call_id": c.call_id, "output": add(c.arguments)} for c in calls]
        previous = response.id
    return WorkflowOutput(response=response.output_text)


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in (response or "")))
