"""A tokenizer's chat template and its capabilities.

Capabilities are detected once by rendering small probe conversations: tools, tool calls and results, the system role,
and the token that ends an assistant message. Missing features, and tool calls in a format that the run's parser cannot
parse, are replaced by text (`template_fallback`): tools are described in the system message, calls and results become
text blocks, a system message is merged into the user message.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from tunesmith.chat.memo import build_cache_key, load_cache_key
from tunesmith.chat.messages import Message, ToolCall
from tunesmith.chat.parsers import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN
from tunesmith.chat.special_tokens import SpecialTokens
from tunesmith.chat.template_fallback import describe_tools_in_system, merge_system_into_user, write_calls_as_text
from tunesmith.chat.template_rendering import JinjaTemplate

MARKUP = (THINK_OPEN, THINK_CLOSE, CALL_OPEN, CALL_CLOSE)
"""Tags that stay visible in decoded text although some tokenizers mark them as special tokens."""

SENTINEL = "zqxjkvbpYw"
PROBE = "probe_qzx"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "p", "parameters": {"type": "object", "properties": {}}},
}


CALL_START, CALL_MIDDLE = f'{CALL_OPEN}\n{{"name": "', '", "arguments":'
HERMES_CALL = re.compile(rf'({CALL_OPEN}\s*{{\s*"name":\s*"){PROBE}(",\s*"arguments":)')


NUM_CONTEXT_MESSAGES = 2
"""Messages that replace the history before a reply: the first one and the one right before the reply."""
NUM_CACHED_TEXTS, MAX_CACHED_MESSAGES, MAX_CACHED_CHARACTERS = 2048, 8, 8192
"""Cache of rendered short conversations, used only for templates whose output depends on their input alone."""


class ChatTemplate:
    """Renders conversations to text in which special tokens spelled by messages are escaped."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, has_hermes_parser: bool, split_special_tokens: bool = True
    ) -> None:
        """Without `split_special_tokens` nothing is escaped: special tokens in messages stay special tokens."""
        self._tokenizer = tokenizer
        self._jinja = JinjaTemplate(tokenizer)
        self._render_cached = functools.lru_cache(maxsize=NUM_CACHED_TEXTS)(self._render_from_key)
        added = tokenizer.added_tokens_decoder
        special = {token_id: str(token) for token_id, token in added.items() if token.special}
        special |= {i: str(tokenizer.convert_ids_to_tokens(i)) for i in tokenizer.all_special_ids}
        self.special_ids = {text: token_id for token_id, text in special.items() if text not in MARKUP}
        """String of each special token -> its id."""
        self.special_tokens = SpecialTokens(tokenizer, self.special_ids) if split_special_tokens else None
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.has_system = self._can_render([Message(role="system", content=PROBE), Message(role="user", content="u")])
        renders_tools = self._can_render([Message(role="user", content="u")], [PROBE_TOOL])
        calls = self._probe_tool_calls(renders_tools)
        hermes = None if calls is None else HERMES_CALL.search(calls)
        self.call_start, self.call_middle = (CALL_START, CALL_MIDDLE) if hermes is None else hermes.groups()
        """Text of a tool call before the name, and between the name and the arguments."""
        self.has_unparsed_calls = has_hermes_parser and renders_tools and hermes is None
        """The template supports tools, but the parser cannot parse its format of tool calls."""
        self.has_tools = renders_tools and not self.has_unparsed_calls
        self.has_tool_calls = calls is not None and (hermes is not None or not has_hermes_parser)
        self.end_of_turn = self._probe_end_of_turn()
        """The special token after an assistant message; None if the header of the next message ends the turn."""

    def uses_variable(self, variable: str) -> bool:
        """Whether the template refers to a variable."""
        return re.search(rf"\b{variable}\b", str(self._tokenizer.get_chat_template())) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        has_generation_prompt: bool = True,
    ) -> str:
        """Text of a conversation, including the generation prompt."""
        messages, tools = self._apply_fallbacks(messages, tools)
        return self._render(messages, tools, variables or {}, has_generation_prompt)

    def render_delta(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str | None:
        """Text after the message whose content is the sentinel; None if it cannot be determined."""
        messages, tools = self._apply_fallbacks(messages, tools)
        found = [index for index, message in enumerate(messages) if SENTINEL in message.content]
        if len(found) == 1 and found[0] > NUM_CONTEXT_MESSAGES and self._jinja.is_rendered_from_neighbors(tools):
            shortened = [messages[0], *messages[found[0] - 1 :]]
            with contextlib.suppress(ValueError):  # the template may refuse the shortened conversation
                delta = self.find_delta(self._render(shortened, tools, variables, True))
                if delta is not None:
                    return delta
        return self.find_delta(self._render(messages, tools, variables, True))

    def _apply_fallbacks(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """Express features that the template lacks as message text."""
        if tools and not self.has_tools:
            messages, tools = describe_tools_in_system(messages, tools), ()
        if not self.has_tool_calls:
            messages = write_calls_as_text(messages)
        if not self.has_system:
            messages = merge_system_into_user(messages)
        return messages, tools

    def find_delta(self, text: str) -> str | None:
        """Text after the sentinel, starting at the special token that ends the turn; None if it cannot be determined.

        If no token ends a turn, the header of the next message must follow the sentinel immediately.
        """
        if text.count(SENTINEL) != 1:
            return None
        after = text.partition(SENTINEL)[2]
        found = self._special_pattern.search(after)
        if found is None:
            return None
        is_end = found.start() == 0 if self.end_of_turn is None else found.group() == self.end_of_turn
        return after[found.start() :] if is_end else None

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        has_generation_prompt: bool,
    ) -> str:
        num_characters = sum(len(message.content) for message in messages)
        is_short = len(messages) <= MAX_CACHED_MESSAGES and num_characters <= MAX_CACHED_CHARACTERS
        if is_short and self._jinja.is_rendered_from_neighbors(tools):
            cache_key = build_cache_key((list(tools), dict(variables), has_generation_prompt))
            if cache_key is not None:
                return self._render_cached(tuple(messages), cache_key)
        return self._render_uncached(messages, tools, variables, has_generation_prompt)

    def _render_from_key(self, messages: tuple[Message, ...], cache_key: bytes) -> str:
        return self._render_uncached(messages, *load_cache_key(cache_key))

    def _render_uncached(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        has_generation_prompt: bool,
    ) -> str:
        inputs: list[Any] = [[message.to_template() for message in messages], list(tools), dict(variables)]
        if self.special_tokens is not None:
            inputs = self.special_tokens.escape(inputs)
        message_dicts, tool_dicts, template_variables = inputs
        try:
            return self._jinja.render(
                message_dicts,
                tools=tool_dicts,
                variables=template_variables,
                has_generation_prompt=has_generation_prompt,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the model's chat template rejects these messages: {error}") from error

    def _can_render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the template accepts the messages and the probe appears in the text."""
        try:
            return PROBE in self._render(messages, tools, {}, True)
        except ValueError:
            return False

    def _probe_tool_calls(self, renders_tools: bool) -> str | None:
        """Text of a tool call and its result after a question; None if the template does not render them."""
        call = ToolCall(call_id="call00000", name=PROBE, arguments='{"a": 1}')
        question = Message(role="user", content="u")
        answer = Message(role="assistant", tool_calls=(call,))
        result = Message(role="tool", content=SENTINEL, tool_call_id="call00000", name=PROBE)
        tools = [PROBE_TOOL] if renders_tools else []
        try:
            before = self._render([question], tools, {}, False)
            text = self._render([question, answer, result], tools, {}, True)
        except ValueError:
            return None
        text = text.removeprefix(before)
        return text if PROBE in text and SENTINEL in text else None

    def _probe_end_of_turn(self) -> str | None:
        messages = [Message(role="user", content="u"), Message(role="assistant", content=SENTINEL)]
        try:
            text = self._render(messages, (), {}, False)
        except ValueError:
            return None
        found = self._special_pattern.search(text, text.find(SENTINEL))
        return None if found is None else found.group()
