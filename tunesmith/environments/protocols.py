"""The two protocols: how a transcript becomes a chat request or a row for fine-tuning, and a reply becomes segments.

`TagProtocol`: one assistant turn of tags; after a call, its result is appended to the turn and the turn is continued
(`continue_final_message`). `NativeProtocol`: tool calls and tool messages of the chat template. Both have the same
methods, described at the first, and are used by the one loop in `environment`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionMessage

from tunesmith.chat.client import read_reasoning
from tunesmith.chat.parsers.reply import THINK_CLOSE, THINK_OPEN
from tunesmith.environments.transcript import ANSWER_CLOSE, ANSWER_OPEN, Finish, Segment, Transcript, wrap_result
from tunesmith.tools.tool import Tool

ReadReply = tuple[tuple[Segment, ...], Finish]
"""The segments of one model call, and why the rollout ends with it if it calls no tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagProtocol:
    """Thoughts, calls, results and the answer as tags inside one assistant turn."""

    tools: Mapping[str, Tool]

    def build_request(self, transcript: Transcript, *, system: str, stop: Sequence[str]) -> dict[str, Any]:
        """`messages` and other fields of the next chat request."""
        messages = build_messages(system, transcript.question)
        extra = {"include_stop_str_in_output": True, "separate_reasoning": False}
        if transcript.text:
            messages.append({"role": "assistant", "content": transcript.text})
            extra |= {"continue_final_message": True, "add_generation_prompt": False}
        return {"messages": messages, "stop": [*self.stops, *stop], "extra_body": extra}

    @property
    def stops(self) -> tuple[str, ...]:
        """Closing tags at which the model waits for a result, or is done."""
        return (*(f"</{name}>" for name in self.tools), ANSWER_CLOSE)

    def read(self, completion: ChatCompletion, transcript: Transcript, *, stop: Sequence[str]) -> ReadReply:
        text = completion.choices[0].message.content or ""
        number = len(transcript.calls) + transcript.refused_calls
        segments = self.read_text(text, before=transcript.open_text, number=number)
        is_answer = bool(segments) and segments[-1].kind == "answer"
        return count_tokens(segments, completion), "answered" if is_answer else find_end(completion, stop)

    def read_text(self, text: str, *, before: str = "", number: int = 0) -> tuple[Segment, ...]:
        """The segments of text up to a closing tag; `before` is earlier text of the same step."""
        name = next((each for each in (*self.tools, "answer") if text.endswith(f"</{each}>")), None)
        if name is None:
            return (Segment(kind="thought", text=text),) if text else ()
        opening = f"<{name}>"
        whole, length = before + text, len(f"</{name}>")
        start = whole.rfind(opening)
        body = whole[start + len(opening) : -length] if start >= 0 else None
        border = max(start - len(before), 0) if start >= 0 else len(text) - length
        thought, rest = text[:border], text[border:]
        if name != "answer":
            arguments = None if body is None else read_tag(body, self.tools[name].text_argument)
            last = Segment(kind="call", text=rest, tool=name, arguments=arguments, call_id=f"call{number + 1}")
        elif body is None:
            return (Segment(kind="thought", text=text),)
        else:
            last = Segment(kind="answer", text=rest)
        return (Segment(kind="thought", text=thought), last) if thought else (last,)

    def wrap(self, result: Segment) -> Segment:
        """A result as the model reads it."""
        return replace(result, text=wrap_result(result.result))

    def write_call(self, thought: str, tool: Tool, text: str, *, number: int) -> tuple[Segment, ...]:
        """The segments with which an author other than the model calls a tool; `text` is its text argument."""
        written = f"{THINK_OPEN}{thought}{THINK_CLOSE}\n<{tool.name}>{text}</{tool.name}>"
        return self.read_text(written, number=number)

    def write_answer(self, thought: str, answer: str) -> tuple[Segment, ...]:
        """The segments with which an author other than the model answers."""
        return self.read_text(f"{THINK_OPEN}{thought}{THINK_CLOSE}\n{ANSWER_OPEN}\\boxed{{{answer}}}{ANSWER_CLOSE}")


def find_end(completion: ChatCompletion, stop: Sequence[str]) -> Finish:
    """Why a rollout ends with a reply that neither answers nor calls a tool; `stop`: the caller's stop strings."""
    choice = completion.choices[0]
    if (choice.message.content or "").endswith(tuple(filter(None, stop))):
        return "stopped"
    return "length" if choice.finish_reason == "length" else "no_answer"


def count_tokens(segments: Sequence[Segment], completion: ChatCompletion) -> tuple[Segment, ...]:
    """The segments of a model call, the last of them with the call's sampled tokens, also of a reply without text."""
    tokens = completion.usage.completion_tokens if completion.usage is not None else 0
    *first, last = segments or (Segment(kind="thought", text=""),)
    return (*first, replace(last, tokens=tokens))


def read_tag(body: str, text_argument: str | None) -> Mapping[str, Any] | None:
    """The arguments in the text of a tag, which is one argument or a JSON object; None if there are none."""
    text = body.strip("\n")
    if not text.strip():
        return None
    if text_argument is not None:
        return {text_argument: text if "\n" in text else text.strip()}
    return read_arguments(text)


def read_arguments(text: str) -> Mapping[str, Any] | None:
    """A JSON object of arguments; None for other text."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def build_messages(system: str, question: str) -> list[dict[str, Any]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": question}]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeProtocol:
    """Tool calls and tool messages of the chat template."""

    tools: Mapping[str, Tool]

    def build_request(self, transcript: Transcript, *, system: str, stop: Sequence[str]) -> dict[str, Any]:
        messages = [*build_messages(system, transcript.question), *build_chat(transcript)]
        fields: dict[str, Any] = {"messages": messages}
        if self.tools:
            fields["tools"] = [each.schema for each in self.tools.values()]
        extra: dict[str, Any] = {}
        if messages[-1]["role"] == "assistant":
            extra |= {"continue_final_message": True, "add_generation_prompt": False}
        if stop:
            fields["stop"] = list(stop)
            extra |= {"include_stop_str_in_output": True}
        return fields | ({"extra_body": extra} if extra else {})

    def read(self, completion: ChatCompletion, transcript: Transcript, *, stop: Sequence[str]) -> ReadReply:
        message = completion.choices[0].message
        reasoning = read_reasoning(message)
        content, end = message.content or "", find_end(completion, stop)
        segments = [Segment(kind="thought", text=reasoning, is_reasoning=True)] if reasoning else []
        is_answer = bool(content.strip()) and not message.tool_calls and end == "no_answer"
        if content:
            segments.append(Segment(kind="answer" if is_answer else "thought", text=content))
        segments += read_calls(message)
        return count_tokens(segments, completion), "answered" if is_answer else end

    def wrap(self, result: Segment) -> Segment:
        return result

    def write_call(self, thought: str, tool: Tool, text: str, *, number: int) -> tuple[Segment, ...]:
        arguments = {tool.text_argument: text} if tool.text_argument is not None else read_arguments(text)
        call = Segment(
            kind="call",
            text=json.dumps(arguments, ensure_ascii=False),
            tool=tool.name,
            arguments=arguments,
            call_id=f"call{number + 1:05d}",
        )
        return (Segment(kind="thought", text=thought), call)

    def write_answer(self, thought: str, answer: str) -> tuple[Segment, ...]:
        return (Segment(kind="answer", text=f"{thought} \\boxed{{{answer}}}"),)


def read_calls(message: ChatCompletionMessage) -> list[Segment]:
    """The calls in a message of the model."""
    return [
        Segment(
            kind="call",
            text=call.function.arguments,
            tool=call.function.name,
            arguments=read_arguments(call.function.arguments),
            call_id=call.id,
        )
        for call in message.tool_calls or ()
        if call.type == "function"
    ]


def write_calls(calls: Sequence[Segment]) -> list[dict[str, Any]]:
    """`tool_calls` of an assistant's message."""
    return [
        {"id": each.call_id, "type": "function", "function": {"name": each.tool, "arguments": each.text}}
        for each in calls
    ]


def write_result(call_id: str, text: str) -> dict[str, Any]:
    """The message with the result of a call."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def build_chat(transcript: Transcript) -> list[dict[str, Any]]:
    """The assistant and tool messages of a native transcript."""
    messages: list[dict[str, Any]] = []
    reply: dict[str, Any] | None = None
    for segment in transcript.segments:
        if segment.kind == "result":
            messages.append(write_result(segment.call_id, segment.text))
            reply = None
            continue
        if reply is None:
            reply = {"role": "assistant", "content": ""}
            messages.append(reply)
        if segment.kind == "call":
            reply.setdefault("tool_calls", []).extend(write_calls([segment]))
        else:
            key = "reasoning_content" if segment.is_reasoning else "content"
            reply[key] = reply.get(key, "") + segment.text
    return messages


def build_conversation(
    transcript: Transcript, *, system: str, tools: Sequence[Mapping[str, Any]], trains_forced: bool = False
) -> dict[str, Any]:
    """A row with `messages`, and with `tools` where calls are native; `trains_forced` trains forced text too."""
    first = build_messages(system, transcript.question)
    if transcript.protocol == "native":
        if not trains_forced and any(each.kind == "forced" for each in transcript.segments):
            raise ValueError("forced text in a native transcript cannot be left out of training: set trains_forced")
        row: dict[str, Any] = {"messages": [*first, *build_chat(transcript)]}
        return row | ({"tools": list(tools)} if tools else {})
    untrained = ("result",) if trains_forced else ("result", "forced")
    parts = [
        {"type": "text", "text": "".join(each.text for each in segments), "weight": weight}
        for weight, segments in groupby(transcript.segments, key=lambda each: int(each.kind not in untrained))
    ]
    return {"messages": [*first, {"role": "assistant", "content": parts}]}
