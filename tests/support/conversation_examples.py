"""A row of a demonstration file: a conversation with a tool call, and its tools."""

TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "6 * 7"}'}}
ROW = {
    "messages": [
        {"role": "system", "content": "Use the tool."},
        {"role": "user", "content": "What is 6 * 7?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
        {"role": "assistant", "content": "The answer is 42."},
    ],
    "tools": [TOOL],
}
