"""A tokenizer's chat template and its capabilities.

Capabilities are detected once by rendering small probe conversations: tools, tool calls and results, the system role,
and the token that ends an assistant message. The format of tool calls is the one whose parser reads the rendered probe
call back (`call_probe`). Missing features, and tool calls in a format that no parser reads, are replaced by text: tools
are described in the system message, calls and results become text blocks, a system message is merged into the user
message. The wording is the one that Hermes-style models are trained on.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from tunesmith.chat.call_probe import PROBE, PROBE_CALL_ID, SENTINEL, RenderedCall, find_rendered_call
from tunesmith.chat.memo import MAX_TOTAL_LENGTH, memoize_value
from tunesmith.chat.messages import Message, ToolCall, load_arguments
from tunesmith.chat.parsers import CALL_FORMATS
from tunesmith.chat.parsers.call_format import CallFormat, Tools
from tunesmith.chat.parsers.harmony import HARMONY
from tunesmith.chat.parsers.hermes import CALL_CLOSE, CALL_OPEN, HERMES
from tunesmith.chat.parsers.json_calls import JSON
from tunesmith.chat.parsers.reply import THINK_CLOSE, THINK_OPEN
from tunesmith.chat.special_tokens import SpecialTokens, build_pattern
from tunesmith.chat.template_rendering import JinjaTemplate, Variables
from tunesmith.errors import ConfigError

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


MARKUP = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
"""Tags that stay visible in decoded text although some tokenizers mark them as special tokens."""

RESULT = "qzwresult"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "p", "parameters": {"type": "object", "properties": {}}},
}
FALLBACK_CALL = RenderedCall(
    call_format=HERMES,
    start=f'{CALL_OPEN}\n{{"name": "',
    middle='", "arguments":',
    separator='", "arguments":',
    argument=None,
    tail=f"}}\n{CALL_CLOSE}",
    example=HERMES_EXAMPLE,
)
"""How `write_calls_as_text` writes calls."""

NUM_CACHED_PROMPTS = 4096
"""Rendered prompts cached, and their ids; the rollouts of a group start with the same prompt, and epochs and
evaluations repeat prompts. `MAX_TOTAL_LENGTH` limits their length."""
NUM_CONTEXT_MESSAGES = 2
"""Messages that replace the history before a reply: the first one and the one right before the reply."""


class ChatTemplate:
    """Renders conversations to text in which special tokens spelled by messages are escaped."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool_call_parser: str = "auto",
        split_special_tokens: bool = True,
        extra_markup: Collection[str] = (),
    ) -> None:
        """`tool_call_parser`: the format of tool calls, `none`, or `auto` for the one that the template writes.
        `extra_markup`: more tags that decoded text keeps.

        Without `split_special_tokens` nothing is escaped: special tokens in messages stay special tokens. Raises
        `ConfigError` if the template writes tool calls in another format than the parser's, unless that is `hermes`,
        whose calls can be written as text, or `json`, which the model writes although it is shown Hermes' calls.
        """
        self._tokenizer = tokenizer
        self._jinja = JinjaTemplate(tokenizer)
        self._render_cached = memoize_value(max_entries=NUM_CACHED_PROMPTS, max_length=MAX_TOTAL_LENGTH)(
            self._render_inputs
        )
        added = tokenizer.added_tokens_decoder
        special = {token_id: str(token) for token_id, token in added.items() if token.special}
        special |= {i: str(tokenizer.convert_ids_to_tokens(i)) for i in tokenizer.all_special_ids}
        self.special_ids = {text: token_id for token_id, text in special.items() if text not in MARKUP}
        """String of each special token -> its id."""
        self.special_tokens = SpecialTokens(tokenizer, self.special_ids if split_special_tokens else {})
        self._turn_pattern = build_pattern(self.special_ids)
        """Special tokens that are not inside of an assistant message."""
        self._writes_arguments_as_text = self._is_harmony = False
        self._call_example = HERMES_EXAMPLE
        self.has_system = self._can_render([Message(role="system", content=PROBE), Message(role="user", content="u")])
        renders_tools = self._can_render([Message(role="user", content="u")], [PROBE_TOOL])
        is_json = tool_call_parser == JSON.name
        tool_call_parser = HERMES.name if is_json else tool_call_parser
        calls, found = self._probe_formats(renders_tools, tool_call_parser)
        if found is None and tool_call_parser not in ("auto", "none", HERMES.name):
            raise ConfigError(
                f"model.tool_call_parser={tool_call_parser} does not read the tool calls that this model's chat "
                "template writes; use auto"
            )
        self.rendered_call = found or FALLBACK_CALL
        written = JSON if is_json else self.rendered_call.call_format
        self.call_format = None if tool_call_parser == "none" else written
        """The format in which the model writes tool calls; None if they are not parsed."""
        self._is_harmony = self.call_format is HARMONY
        has_parser = tool_call_parser != "none"
        is_hermes = self.rendered_call.call_format is HERMES
        self._call_example = HERMES_EXAMPLE if is_hermes else self.rendered_call.example
        self.has_unparsed_calls = has_parser and renders_tools and found is None
        """The template supports tools, but no parser reads its format of tool calls."""
        self.has_tools = renders_tools and not self.has_unparsed_calls
        self.has_tool_calls = calls is not None and (found is not None or not has_parser)
        if self.call_format is not None:
            self._turn_pattern = self._build_turn_pattern(self.call_format)
        markup = frozenset() if self.call_format is None else frozenset(self.call_format.markup)
        self.hidden_ids = [
            token_id for text, token_id in self.special_ids.items() if text not in markup.union(extra_markup)
        ]
        """Ids of the special tokens that decoded text leaves out."""
        self.end_of_turn = self._probe_end_of_turn()
        """The special token after an assistant message; None if the header of the next message ends the turn."""

    def uses_variable(self, variable: str) -> bool:
        return re.search(rf"\b{variable}\b", str(self._tokenizer.get_chat_template())) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = (),
        variables: Variables | None = None,
        has_generation_prompt: bool = True,
    ) -> str:
        """Text of a conversation, including the generation prompt."""
        messages, tools = self._apply_fallbacks(messages, tools)
        return self._render(messages, tools, variables or {}, has_generation_prompt, is_cached=True)

    def render_delta(
        self, messages: Sequence[Message], *, tools: Tools, variables: Variables, appended: str = ""
    ) -> str | None:
        """Text after the last message whose content, or last argument, is the sentinel; None if it is undetermined.

        `appended`: text that follows the sentinel in the message; the result begins with it, as the template writes it.
        """
        if not self.has_system or (tools and not self.has_tools):  # expressed in other messages than where it occurs
            messages, tools = self._apply_fallbacks(messages, tools)
        position = next((index for index in range(len(messages) - 1, 0, -1) if _has_sentinel(messages[index])), 0)
        if position > NUM_CONTEXT_MESSAGES and self._jinja.is_rendered_from_neighbors(tools):
            shortened = [messages[0], *messages[position - 1 :]]
            with contextlib.suppress(ValueError):  # the template may refuse the shortened conversation
                delta = self._render_and_find_delta(shortened, tools, variables, appended)
                if delta is not None:
                    return delta
        return self._render_and_find_delta(messages, tools, variables, appended)

    def _render_and_find_delta(
        self, messages: Sequence[Message], tools: Tools, variables: Variables, appended: str
    ) -> str | None:
        messages, tools = self._apply_fallbacks(messages, tools)
        call_id = _find_sentinel_call(messages)
        return self.find_delta(self._render(messages, tools, variables, True), call_id=call_id, appended=appended)

    def _apply_fallbacks(self, messages: Sequence[Message], tools: Tools) -> tuple[Sequence[Message], Tools]:
        """Express features that the template lacks as message text."""
        if tools and not self.has_tools:
            messages, tools = describe_tools_in_system(messages, tools, example=self._call_example), ()
        if not self.has_tool_calls:
            messages = write_calls_as_text(messages)
        if not self.has_system:
            messages = merge_system_into_user(messages)
        return messages, tools

    def find_delta(self, text: str, *, call_id: str | None = None, appended: str = "") -> str | None:
        """Text after the sentinel, starting at the special token that ends the turn; None if it cannot be determined.

        If no token ends a turn, the header of the next message must follow the sentinel immediately. `call_id`: the
        sentinel is the last argument of the call with this id, and the end of the call follows first. `appended`:
        text that must follow the sentinel, up to whitespace at its end; it is part of the result.
        """
        if text.count(SENTINEL) != 1:
            return None
        after = text.partition(SENTINEL)[2]
        found = self._turn_pattern.search(after)
        if found is None:
            return None
        if call_id is not None:
            tail = self.rendered_call.tail.replace(PROBE_CALL_ID, call_id)
            return after[found.start() :] if after[: found.start()] == tail and tail.rstrip() == tail else None
        if appended:
            written = self.special_tokens.unescape(after[: found.start()])
            is_end = self.end_of_turn is None or found.group() in self._ends_of_turn
            return after if is_end and written.rstrip() == appended.rstrip() else None
        is_end = found.start() == 0 if self.end_of_turn is None else found.group() in self._ends_of_turn
        return after[found.start() :] if is_end else None

    def _render(
        self, messages: Sequence[Message], tools: Tools, variables: Variables, has_prompt: bool, is_cached: bool = False
    ) -> str:
        inputs = [[self._convert(message) for message in messages], list(tools), dict(variables), has_prompt]
        is_cached = is_cached and self._jinja.is_pure(tools, variables)
        return (self._render_cached if is_cached else self._render_inputs)(inputs)

    def _render_inputs(self, inputs: list[Any]) -> str:
        try:
            return self._jinja.render(*self.special_tokens.escape(inputs))
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the model's chat template rejects these messages: {error}") from error

    def _convert(self, message: Message) -> dict[str, Any]:
        """The dict of a message, with the names and types that the template reads."""
        fields = message.to_template()
        if self._writes_arguments_as_text:
            for call in fields.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, str):
                    call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        if self._is_harmony and "reasoning_content" in fields and not (message.content and message.tool_calls):
            fields["thinking"] = fields["reasoning_content"]
        return fields

    def _can_render(self, messages: Sequence[Message], tools: Tools = ()) -> bool:
        """Whether the template accepts the messages and the probe appears in the text."""
        try:
            return PROBE in self._render(messages, tools, {}, True)
        except ValueError:
            return False

    def _probe_formats(self, renders_tools: bool, tool_call_parser: str) -> tuple[str | None, RenderedCall | None]:
        """Text of a rendered call, and how it is written; None if the template renders none or no parser reads it."""
        tried = [each for each in CALL_FORMATS.values() if each.template_tags]
        formats = [CALL_FORMATS[tool_call_parser]] if tool_call_parser in CALL_FORMATS else tried
        rendered = None
        for is_text in (False, True):
            self._writes_arguments_as_text = is_text
            calls = self._probe_tool_calls(renders_tools)
            if calls is not None and tool_call_parser == "none":
                return calls, None
            for call_format in formats if calls is not None else ():
                turn_ends = self._build_turn_pattern(call_format)
                found = find_rendered_call(calls or "", call_format, turn_ends=turn_ends)
                if found is not None:
                    return calls, found
            rendered = rendered or calls
        self._writes_arguments_as_text = False
        return rendered, None

    def _build_turn_pattern(self, call_format: CallFormat) -> re.Pattern[str]:
        return build_pattern(self.special_ids.keys() - call_format.inner_markup)

    def _probe_tool_calls(self, renders_tools: bool) -> str | None:
        """Text of a tool call and its result after a question; None if the template does not render them."""
        call = ToolCall(call_id=PROBE_CALL_ID, name=PROBE, arguments=json.dumps({"a": SENTINEL}))
        question = Message(role="user", content="u")
        answer = Message(role="assistant", tool_calls=(call,))
        result = Message(role="tool", content=RESULT, tool_call_id=PROBE_CALL_ID, name=PROBE)
        tools = [PROBE_TOOL] if renders_tools else []
        try:
            text = self._render([question, answer, result], tools, {}, True)
            prompts = [self._render([question], tools, {}, has_prompt) for has_prompt in (True, False)]
        except ValueError:
            return None
        prompt = next((each for each in prompts if text.startswith(each)), "")
        text = text.removeprefix(prompt)
        return text if PROBE in text and RESULT in text else None

    @functools.cached_property
    def _ends_of_turn(self) -> frozenset[str | None]:
        """Tokens that end an assistant message: the last of a conversation, and one before another message."""
        ends = {self.end_of_turn}
        if self._is_harmony:
            ends.add(self._probe_end_of_turn(Message(role="user", content="u")))
        return frozenset(ends)

    def _probe_end_of_turn(self, *following: Message) -> str | None:
        """The token after an assistant message, at the end of a conversation or before a following message."""
        messages = [Message(role="user", content="u"), Message(role="assistant", content=SENTINEL), *following]
        try:
            text = self._render(messages, (), {}, bool(following))
        except ValueError:
            return None
        found = self._turn_pattern.search(text, text.find(SENTINEL))
        return None if found is None else found.group()


def _has_sentinel(message: Message) -> bool:
    return SENTINEL in message.content or any(SENTINEL in call.arguments for call in message.tool_calls)


def _find_sentinel_call(messages: Sequence[Message]) -> str | None:
    calls = (call for message in messages for call in message.tool_calls if SENTINEL in call.arguments)
    return next((call.call_id or "" for call in calls), None)
