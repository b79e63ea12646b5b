"""Text replacements for features that a chat template lacks.

Templates without tools, tool calls or a system role still work for agents: tools are described in the system message,
calls and results are written as text blocks, and a system message is merged into the user message. The wording is the
one that Hermes-style models are trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunesmith.chat.messages import Message, ToolCall, load_arguments

TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

{format}"""

HERMES_FORMAT = """For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
{example}"""
OTHER_FORMAT = """For each function call, write:
{example}"""
HERMES_EXAMPLE = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'


def describe_tools_in_system(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, example: str = HERMES_EXAMPLE
) -> list[Message]:
    """Describe tools in the system message, for templates without tools; `example`: how the model writes a call."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    call_format = (HERMES_FORMAT if example == HERMES_EXAMPLE else OTHER_FORMAT).format(example=example)
    prompt = TOOLS_PROMPT.format(tools=lines, format=call_format)
    if messages and messages[0].role == "system":
        first = replace(messages[0], content=f"{messages[0].content}\n\n{prompt}".lstrip())
        return [first, *messages[1:]]
    return [Message(role="system", content=prompt), *messages]


def write_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """Write tool calls and results as text blocks, for templates that do not render them.

    Consecutive results share one user message.
    """
    converted: list[Message] = []
    was_result = False
    for message in messages:
        is_result = message.role == "tool"
        if is_result:
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if was_result:
                text = f"{converted.pop().content}\n{text}"
            converted.append(Message(role="user", content=text))
        elif message.tool_calls:
            blocks = [message.content] if message.content else []
            blocks += [_format_call(call) for call in message.tool_calls]
            content = "\n".join(blocks)
            converted.append(
                Message(role=message.role, content=content, reasoning=message.reasoning, name=message.name)
            )
        else:
            converted.append(message)
        was_result = is_result
    return converted


def _format_call(call: ToolCall) -> str:
    name, arguments = (json.dumps(each, ensure_ascii=False) for each in (call.name, load_arguments(call.arguments)))
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def merge_system_into_user(messages: Sequence[Message]) -> list[Message]:
    """Prepend each system message to the next user message, for templates without a system role."""
    converted: list[Message] = []
    pending: list[str] = []
    for message in messages:
        if message.role == "system":
            pending.append(message.content)
        elif message.role == "user" and pending:
            converted.append(replace(message, content="\n\n".join([*pending, message.content])))
            pending = []
        else:
            converted.append(message)
    if pending:
        converted.append(Message(role="user", content="\n\n".join(pending)))
    return converted
