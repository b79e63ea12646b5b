"""A tokenizer's chat template, and what it can do.

What a template supports is found out once by rendering small conversations: tools, tool calls and results, a system
role, and which token ends an assistant's turn. What it lacks is rendered in words the model can still read: tools are
described in the system message, calls and results become text blocks, a system message joins the user's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from tunesmith.model.messages import Message, ToolCall, put_calls_in_text, put_system_in_user, put_tools_in_system
from tunesmith.model.reply import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKUP = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
"""Tokens that stay visible in text although some tokenizers call them special."""

SENTINEL = "zqxjkvbpYw"
PROBE = "probe_qzx"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "p", "parameters": {"type": "object", "properties": {}}},
}


class ChatTemplate:
    """Renders conversations to text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {token_id: str(token) for token_id, token in added.items() if token.special}
        special |= {i: str(tokenizer.convert_ids_to_tokens(i)) for i in tokenizer.all_special_ids}
        self.special_ids = {text: token_id for token_id, text in special.items() if text not in MARKUP}
        """Text of each special token -> its id."""
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.has_system = self._shows([Message(role="system", content=PROBE), Message(role="user", content="u")])
        self.has_tools = self._shows([Message(role="user", content="u")], [PROBE_TOOL])
        self.call_start, self.call_middle = f'{CALL_OPEN}\n{{"name": "', '", "arguments":'
        """How a call is written before its name, and between its name and its arguments."""
        self.has_tool_calls = self._probe_tool_calls()
        self.end_of_turn = self._probe_end_of_turn()
        """Text of the special token after an assistant's message; None when the template writes none."""

    def reads(self, variable: str) -> bool:
        """Whether the template mentions a variable."""
        return re.search(rf"\b{variable}\b", str(self._tokenizer.get_chat_template())) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        has_generation_prompt: bool = True,
    ) -> str:
        """Text of a conversation, up to where the assistant speaks next."""
        if tools and not self.has_tools:
            messages, tools = put_tools_in_system(messages, tools), ()
        if not self.has_tool_calls:
            messages = put_calls_in_text(messages)
        if not self.has_system:
            messages = put_system_in_user(messages)
        return self._render(messages, tools, variables or {}, has_generation_prompt)

    def find_special(self, text: str) -> str | None:
        """The first special token in a text."""
        found = self._special_pattern.search(text)
        return None if found is None else found.group()

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        has_generation_prompt: bool,
    ) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [message.to_template() for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=has_generation_prompt,
                **variables,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        assert isinstance(text, str)
        return text

    def _shows(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the template renders the messages, with the probe in the text."""
        try:
            return PROBE in self._render(messages, tools, {}, True)
        except ValueError:
            return False

    def _probe_tool_calls(self) -> bool:
        call = ToolCall(call_id="call00000", name=PROBE, arguments='{"a": 1}')
        asked = [Message(role="user", content="u"), Message(role="assistant", tool_calls=(call,))]
        answered = [*asked, Message(role="tool", content=SENTINEL, tool_call_id="call00000", name=PROBE)]
        try:
            text = self._render(answered, [PROBE_TOOL] if self.has_tools else [], {}, True)
        except ValueError:
            return False
        shown = text.rfind(PROBE, 0, text.find(SENTINEL))
        start = text.rfind(CALL_OPEN, 0, shown)
        middle = re.compile(rf'{PROBE}(",\s*"arguments":)').search(text, start)
        if 0 <= start < shown and text[start:shown].endswith('"') and middle is not None and middle.start() == shown:
            self.call_start, self.call_middle = text[start:shown], middle.group(1)
        conversation = self._render(asked[:1], [PROBE_TOOL] if self.has_tools else [], {}, False)
        return SENTINEL in text and PROBE in text.removeprefix(conversation)

    def _probe_end_of_turn(self) -> str | None:
        messages = [Message(role="user", content="u"), Message(role="assistant", content=SENTINEL)]
        try:
            text = self._render(messages, (), {}, False)
        except ValueError:
            return None
        return self.find_special(text.partition(SENTINEL)[2])
