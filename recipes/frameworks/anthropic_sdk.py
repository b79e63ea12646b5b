"""An agent on the Anthropic SDK: the Messages API with a tool."""

from tunesmith import JudgeOutput, WorkflowOutput

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


def add(arguments):
    try:
        return str(sum(arguments.values()))
    except TypeError as error:
        return f"Error: {error}"


async def workflow(task, model):
    client = model.as_anthropic_client()
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(4):
        reply = await client.messages.create(model=model.model_name, max_tokens=256, messages=messages, tools=[ADD])
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            break
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)} for call in calls]
        messages.append({"role": "user", "content": results})
    return WorkflowOutput(response="".join(block.text for block in reply.content if block.type == "text"))


async def judge(task, response):
    return JudgeOutput(reward=float(task["answer"] in response))
