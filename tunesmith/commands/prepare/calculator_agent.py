"""The agent that the pipeline prepares data for, trains and evaluates: it answers one question with a calculator.

It needs no agent framework and uses the OpenAI client of whichever chat model it receives. `build_conversation` builds
the first messages of rollouts and of demonstrations, so that fine-tuning and sampling use the same prompt. Errors of
the model are returned to it as tool results that begin with "Error:".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessage

from tunesmith.chat.client import CONTEXT_LENGTH_EXCEEDED, create_chat_completion
from tunesmith.chat.parsers import CALL_OPEN
from tunesmith.judges.transcript import build_transcript
from tunesmith.tools.calculator import CALCULATOR_TOOL, answer_call
from tunesmith.types import Workflow, WorkflowOutput

SYSTEM_PROMPT = (
    "Solve the math problem. Think inside <think></think> and let the calculator compute every calculation. "
    "End with one line: #### and the final number."
)
TOOLS = (CALCULATOR_TOOL,)
MAX_MODEL_CALLS = 16
"""Limit per rollout; the longest solutions of GSM8K need ten."""
MAX_PARALLEL_CALLS = 8
"""Tool calls of one reply that are executed; further calls get an error."""
MALFORMED_CALL = (
    'Error: the tool call cannot be read; write <tool_call>\n{"name": "calculator", "arguments": '
    '{"expression": "2 * 3"}}\n</tool_call>'
)


def build_conversation(question: str) -> list[dict[str, Any]]:
    """System prompt and question."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def build_calculator_agent(
    *, max_model_calls: int = MAX_MODEL_CALLS, max_parallel_calls: int = MAX_PARALLEL_CALLS
) -> Workflow:
    """The calculator agent with the given limits."""

    async def calculator_agent(task: Mapping[str, Any], model: Any) -> WorkflowOutput:
        """Call the model and execute its tool calls until it answers without one or a limit is reached."""
        messages = build_conversation(task["question"])
        num_prompt_messages = len(messages)
        for _ in range(max_model_calls):
            try:
                completion = await create_chat_completion(model, messages, tools=TOOLS)
            except openai.BadRequestError as error:
                if error.code != CONTEXT_LENGTH_EXCEEDED or len(messages) == num_prompt_messages:
                    raise
                break  # no room for another turn: the response is what the model wrote so far
            choice = completion.choices[0]
            messages.append(build_reply(choice.message))
            observations = run_tool_calls(choice.message, max_parallel_calls=max_parallel_calls)
            if not observations or choice.finish_reason == "length":
                break
            messages += observations
        return WorkflowOutput(response=build_transcript(messages), metrics=count_calls(messages))

    return calculator_agent


def build_reply(message: ChatCompletionMessage) -> dict[str, Any]:
    """The model's message in the form that the next request sends as history."""
    reply: dict[str, Any] = {"role": "assistant", "content": message.content}
    reasoning = getattr(message, "reasoning_content", None)
    if reasoning:
        reply["reasoning_content"] = reasoning
    if message.tool_calls:
        reply["tool_calls"] = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls]
    return reply


def run_tool_calls(message: ChatCompletionMessage, *, max_parallel_calls: int) -> list[dict[str, Any]]:
    """Messages with the result of each tool call, or an error for an unparsable call; empty without calls."""
    if not message.tool_calls:
        if CALL_OPEN not in (message.content or ""):
            return []
        return [{"role": "user", "content": MALFORMED_CALL}]
    observations = []
    for number, call in enumerate(message.tool_calls):
        if call.type != "function":
            result = "Error: the call is not of a function"
        elif number >= max_parallel_calls:
            result = f"Error: at most {max_parallel_calls} calls at once are computed; call again"
        else:
            result = answer_call(call.function.name, call.function.arguments)
        observations.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return observations


def count_calls(messages: list[dict[str, Any]]) -> dict[str, float]:
    """Metrics: number of calculator calls, and of calls answered with an error."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    num_malformed = sum(message["content"] == MALFORMED_CALL for message in messages)
    num_errors = sum(result.startswith("Error:") for result in results) + num_malformed
    return {"tool_calls": float(len(results)), "tool_errors": float(num_errors)}


calculator_agent = build_calculator_agent()
"""The agent with default limits: `workflow: tunesmith.commands.prepare.calculator_agent:calculator_agent`."""
