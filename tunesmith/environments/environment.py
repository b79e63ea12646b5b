"""The environment of a tool agent: the loop of model calls and tool calls, for prompting, training and evaluation.

`await environment.run(question, model)` returns a `Transcript`. The model is reached through its OpenAI-compatible
client alone, so that rollouts record each model call and external models work too. With `prefix`, a transcript that
another rollout or author began is continued under the same limits: a branch, a repair or a hint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import openai

from tunesmith.chat.client import CONTEXT_LENGTH_EXCEEDED, create_chat_completion
from tunesmith.config.environment import EnvironmentSection
from tunesmith.environments.protocols import NativeProtocol, TagProtocol, build_conversation
from tunesmith.environments.toolbox import Toolbox
from tunesmith.environments.transcript import Segment, Transcript
from tunesmith.tools.tool import Tool

OVERLONG = "maximum context length"
"""Part of the message with which vLLM and SGLang refuse a prompt that is too long."""


class Environment:
    """Tools, protocol, prompt and limits of an agent; one object serves all rollouts of a process.

    Args:
        config (`EnvironmentSection`, *optional*):
            Protocol, prompt and limits. Its `tools` are not loaded here.
        tools (`Sequence[Tool]`, *optional*):
            The tools.
    """

    def __init__(self, config: EnvironmentSection | None = None, tools: Sequence[Tool] = ()) -> None:
        self.config = config or EnvironmentSection()
        self.tools: Mapping[str, Tool] = {each.name: each for each in tools}
        if len(self.tools) < len(tools):
            raise ValueError(f"two tools have the same name: {', '.join(sorted(each.name for each in tools))}")
        self.protocol = (
            TagProtocol(tools=self.tools) if self.config.protocol == "tags" else NativeProtocol(tools=self.tools)
        )
        self.system_prompt = build_system_prompt(self.config, tools)

    def for_task(self, row: Mapping[str, Any]) -> Environment:
        """The environment with those of its tools that the row's field `tools` names; itself without the field.
        ValueError for other names."""
        if (names := row.get("tools")) is None:
            return self
        if isinstance(names, str) or (unknown := [each for each in names if each not in list(self.tools)]):
            wrong = repr(names) if isinstance(names, str) else ", ".join(map(repr, unknown))
            raise ValueError(
                f"tools of a task must be a list of names of environment.tools ({', '.join(self.tools) or 'none'}), "
                f"got {wrong}"
            )
        return Environment(self.config, [self.tools[each] for each in names])

    def begin(self, question: str) -> Transcript:
        """The transcript of a rollout before its first model call."""
        transcript = Transcript(question=question, protocol=self.config.protocol)
        return transcript.force(self.config.opening) if self.config.opening else transcript

    async def run(
        self,
        question: str,
        model: Any,
        *,
        prefix: Transcript | None = None,
        stop: Sequence[str] = (),
        max_calls: int | None = None,
        max_tokens: int | None = None,
        **fields: Any,
    ) -> Transcript:
        """Run the agent on a question, or from a prefix, to its end.

        Calls at the end of the prefix that have no result are run first. `stop`: further strings at which the rollout
        ends (finish `stopped`). `max_calls` and `max_tokens` replace those of the config, and count the prefix too.
        `fields` are fields of every chat request, such as temperature. Errors of tools that are no results
        (`ToolUnavailableError`) are raised.
        """
        transcript = self.begin(question) if prefix is None else replace(prefix, question=question, finish=None)
        if transcript.protocol != self.config.protocol:
            raise ValueError(
                f"a prefix of protocol {transcript.protocol!r} in an environment of {self.config.protocol!r}"
            )
        max_tokens = max_tokens or self.config.max_tokens
        async with self._build_toolbox(self.config.max_calls if max_calls is None else max_calls) as toolbox:
            await toolbox.replay(transcript)
            while transcript.finish is None:
                transcript = await self._advance(transcript, model, toolbox, max_tokens, stop, fields)
        return transcript

    async def execute(self, transcript: Transcript) -> Transcript:
        """The transcript with the results of the calls at its end, without a model."""
        async with self._build_toolbox(self.config.max_calls) as toolbox:
            await toolbox.replay(transcript)
            results = await toolbox.run(transcript.open_calls)
        return transcript.append(*map(self.protocol.wrap, results))

    def write_call(self, transcript: Transcript, *, tool: str, thought: str, text: str) -> Transcript:
        """The transcript with a call that an expert or a script makes, not run yet (`execute` runs it)."""
        number = len(transcript.calls) + transcript.refused_calls
        return transcript.append(*self.protocol.write_call(thought, self.tools[tool], text, number=number))

    def write_result(self, transcript: Transcript, text: str) -> Transcript:
        """The transcript with a given result of its open call; the call is not run."""
        (call,) = transcript.open_calls
        result = Segment(kind="result", text=text, tool=call.tool, result=text, call_id=call.call_id)
        return transcript.append(self.protocol.wrap(result))

    def write_answer(self, transcript: Transcript, *, thought: str, text: str) -> Transcript:
        """The transcript with an answer that an expert or a script gives."""
        return replace(transcript.append(*self.protocol.write_answer(thought, text)), finish="answered")

    def build_conversation(self, transcript: Transcript, *, trains_forced: bool = False) -> dict[str, Any]:
        """The transcript as a row for fine-tuning. Results are not trained, forced text only with `trains_forced`."""
        tools = [each.schema for each in self.tools.values()]
        return build_conversation(transcript, system=self.system_prompt, tools=tools, trains_forced=trains_forced)

    def _build_toolbox(self, max_calls: int) -> Toolbox:
        return Toolbox(tools=self.tools, max_calls=max_calls, max_result_chars=self.config.max_result_chars)

    async def _advance(
        self,
        transcript: Transcript,
        model: Any,
        toolbox: Toolbox,
        max_tokens: int | None,
        stop: Sequence[str],
        fields: Mapping[str, Any],
    ) -> Transcript:
        """One model call with the tool calls before it."""
        if calls := transcript.open_calls:
            results = await toolbox.run(calls)
            was_refused = transcript.refused_calls > 0
            transcript = transcript.append(*map(self.protocol.wrap, results))
            if was_refused and any(each.failure == "call_limit" for each in results):
                return replace(transcript, finish="call_limit")
        remaining = None if max_tokens is None else max_tokens - transcript.reasoning_tokens
        if remaining is not None and remaining < 1:
            return replace(transcript, finish="length")
        request = self.protocol.build_request(transcript, system=self.system_prompt, stop=stop)
        extra = {**fields.get("extra_body", {}), **request.pop("extra_body", {})}
        request = {**fields, **request} | ({"extra_body": extra} if extra else {})
        if remaining is not None:
            given = request.get("max_tokens") or getattr(model, "options", {}).get("max_tokens")
            request["max_tokens"] = remaining if given is None else min(given, remaining)
        messages = request.pop("messages")
        tools = request.pop("tools", ())
        try:
            completion = await create_chat_completion(model, messages, tools=tools, **request)
        except openai.BadRequestError as error:
            if not is_context_full(error):
                raise
            return replace(transcript, finish="length")
        segments, finish = self.protocol.read(completion, transcript, stop=stop)
        transcript = transcript.append(*segments)
        return replace(transcript, finish=None if transcript.open_calls else finish)


def is_context_full(error: openai.BadRequestError) -> bool:
    """Whether a request was refused because its prompt fills the context."""
    return error.code == CONTEXT_LENGTH_EXCEEDED or OVERLONG in str(error)


TAGS_WITH_TOOLS = """Solve the problem step by step. You may use these tools:
{tools}

Write every step in tags. Think inside <think> and </think>. To use a tool, write its tag with the input inside, and
stop: the result appears between <result> and </result>, and you think again about what it says. Never write <result>
yourself. Call a tool only if you need it, and never for what you already know.

When you know the answer, write it between <answer> and </answer>, with the final answer itself in \\boxed{{}}.

An example of the format:
{example}"""
TAGS_WITHOUT_TOOLS = """Solve the problem step by step. Think inside <think> and </think>, then write the answer between
<answer> and </answer>, with the final answer itself in \\boxed{{}}.

An example of the format:
{example}"""
TAGS_BRIEF = "Think in <think></think>.{calls} Answer in <answer></answer>, the final answer in \\boxed{{}}."
NATIVE_WITH_TOOLS = """Solve the problem step by step. Call a tool only if you need it, and never for what you already
know. When you know the answer, write it without a further call, with the final answer itself in \\boxed{{}}."""
NATIVE_WITHOUT_TOOLS = "Solve the problem step by step. Write the final answer itself in \\boxed{{}}."

EXAMPLE_INPUTS = {
    "python": "print(1979 - 1912)",
    "calculator": "1979 - 1912",
    "search": "year of birth of the architect",
}
ANSWER_EXAMPLE = r"<answer>The final answer is \[ \boxed{67} \]</answer>"


def build_system_prompt(config: EnvironmentSection, tools: Sequence[Tool]) -> str:
    """The system prompt; empty if the model needs none."""
    if config.system_prompt is not None:
        return config.system_prompt.replace("{tools}", describe_tools(tools))
    if config.prompt == "none":
        return ""
    if config.protocol == "native":
        return (NATIVE_WITH_TOOLS if tools else NATIVE_WITHOUT_TOOLS).format()
    if config.prompt == "brief":
        names = ", ".join(f"<{each.name}></{each.name}>" for each in tools)
        calls = f" Tools: {names}; their output comes in <result></result>." if tools else ""
        return TAGS_BRIEF.format(calls=calls)
    template = TAGS_WITH_TOOLS if tools else TAGS_WITHOUT_TOOLS
    return template.format(tools=describe_tools(tools), example=write_example(tools))


def describe_tools(tools: Sequence[Tool]) -> str:
    """One line for each tool: its tag, what goes in it, and what it does."""
    return "\n".join(f"- <{each.name}>{describe_input(each)}</{each.name}>: {each.description}" for each in tools)


def describe_input(tool: Tool) -> str:
    """What the text of a tag is: one argument, or a JSON object of arguments."""
    if tool.text_argument is not None:
        return tool.text_argument
    return json.dumps({name: each.get("type", "any") for name, each in tool.parameters.get("properties", {}).items()})


def write_example(tools: Sequence[Tool]) -> str:
    """A worked example with at most two of the tools."""
    steps = []
    for tool in tools[:2]:
        text = EXAMPLE_INPUTS.get(tool.name, describe_input(tool))
        steps.append(f"<think>What I need next, and why.</think>\n<{tool.name}>{text}</{tool.name}>")
        steps.append("<result>\nwhat the tool returns\n</result>")
    return "\n".join([*steps, f"<think>What follows from it.</think>\n{ANSWER_EXAMPLE}"])
