"""The environment of a tool agent: the loop of model calls and tool calls, for prompting, training and evaluation.

`await environment.run(question, model)` returns a `Transcript`. The model is reached through its OpenAI-compatible
client alone, so that rollouts record each model call and external models work too. With `prefix`, a transcript that
another rollout or author began is continued under the same limits: a branch, a repair or a hint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from tunesmith.chat.client import CONTEXT_LENGTH_EXCEEDED, create_chat_completion
from tunesmith.config.environment.environment import EnvironmentSection
from tunesmith.environments.conversations import build_conversation
from tunesmith.environments.prompts import build_system_prompt
from tunesmith.environments.protocols import AgentProtocol, NativeProtocol, ReadReply, TagProtocol
from tunesmith.environments.toolbox import Toolbox
from tunesmith.environments.transcript import Finish, Segment, Transcript
from tunesmith.tools.tool import Tool

OVERLONG = "maximum context length"
"""Part of the message with which vLLM and SGLang refuse a prompt that is too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one rollout, a prefix included."""

    max_calls: int
    max_tokens: int | None


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
        self.protocol: AgentProtocol = (
            TagProtocol(tools=self.tools, opening=self.config.opening)
            if self.config.protocol == "tags"
            else NativeProtocol(tools=self.tools)
        )
        self.system_prompt = build_system_prompt(self.config, tools)

    def begin(self, question: str) -> Transcript:
        """The transcript of a rollout before its first model call."""
        return self.protocol.begin(question)

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
        limits = Limits(
            max_calls=self.config.max_calls if max_calls is None else max_calls,
            max_tokens=max_tokens or self.config.max_tokens,
        )
        transcript = self.begin(question) if prefix is None else replace(prefix, question=question, finish=None)
        if transcript.protocol != self.config.protocol:
            raise ValueError(
                f"a prefix of protocol {transcript.protocol!r} in an environment of {self.config.protocol!r}"
            )
        toolbox = self._build_toolbox(limits.max_calls)
        async with toolbox:
            await toolbox.replay(transcript)
            while transcript.finish is None:
                transcript = await self._advance(transcript, model, toolbox, limits, stop, fields)
        return transcript

    async def execute(self, transcript: Transcript) -> Transcript:
        """The transcript with the results of the calls at its end, without a model."""
        toolbox = self._build_toolbox(self.config.max_calls)
        async with toolbox:
            await toolbox.replay(transcript)
            results = await toolbox.run(transcript.open_calls)
        return transcript.append(*map(self.protocol.wrap, results))

    def write_call(self, transcript: Transcript, *, tool: str, thought: str, text: str) -> Transcript:
        """The transcript with a call that an expert or a script makes, not run yet (`execute` runs it)."""
        call = self.protocol.write_call(thought, self.tools[tool], text, number=len(transcript.calls))
        return transcript.append(*call)

    def write_result(self, transcript: Transcript, text: str) -> Transcript:
        """The transcript with a given result of its open call, which is not run."""
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
        limits: Limits,
        stop: Sequence[str],
        fields: Mapping[str, Any],
    ) -> Transcript:
        """One model call with the tool calls before it."""
        if calls := transcript.open_calls:
            results = await toolbox.run(calls)
            if transcript.refused_calls and any(each.failure == "call_limit" for each in results):
                return replace(transcript, finish="call_limit")
            transcript = transcript.append(*map(self.protocol.wrap, results))
        remaining = None if limits.max_tokens is None else limits.max_tokens - transcript.reasoning_tokens
        if remaining is not None and remaining < 1:
            return replace(transcript, finish="length")
        completion = await self._sample(transcript, model, stop, fields, remaining)
        if completion is None:
            return replace(transcript, finish="length")
        reply = self.protocol.read(completion, transcript, stop=stop)
        transcript = transcript.append(*reply.segments)
        return replace(transcript, finish=None if transcript.open_calls else find_finish(reply))

    async def _sample(
        self,
        transcript: Transcript,
        model: Any,
        stop: Sequence[str],
        fields: Mapping[str, Any],
        remaining: int | None,
    ) -> ChatCompletion | None:
        """The next completion; None if the prompt fills the context."""
        request = self.protocol.build_request(transcript, system=self.system_prompt, stop=stop)
        extra = {**fields.get("extra_body", {}), **request.pop("extra_body", {})}
        request = {**fields, **request} | ({"extra_body": extra} if extra else {})
        if remaining is not None:
            given = request.get("max_tokens") or getattr(model, "options", {}).get("max_tokens")
            request["max_tokens"] = remaining if given is None else min(given, remaining)
        messages = request.pop("messages")
        tools = request.pop("tools", ())
        try:
            return await create_chat_completion(model, messages, tools=tools, **request)
        except openai.BadRequestError as error:
            if not is_context_full(error):
                raise
            return None


def is_context_full(error: openai.BadRequestError) -> bool:
    """Whether a request was refused because its prompt fills the context."""
    return error.code == CONTEXT_LENGTH_EXCEEDED or OVERLONG in str(error)


def find_finish(reply: ReadReply) -> Finish:
    """Why a rollout ended whose last reply calls no tool."""
    if reply.is_answer:
        return "answered"
    if reply.stop:
        return "stopped"
    return "length" if reply.is_truncated else "no_answer"
