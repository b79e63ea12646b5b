"""A tokenizer's chat template, and what it can do.

What a template supports is found out once by rendering small conversations: tools, tool calls and results, a system
role, and which token ends an assistant's turn. What it lacks, or writes in a form that the run's parser does not read,
is rendered in words: tools are described in the system message, calls and results become text blocks, a system message
joins the user's.
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
"""Tokens that stay visible in text although some tokenizers call them special."""

SENTINEL = "zqxjkvbpYw"
PROBE = "probe_qzx"
PROBE_TOOL = {
    "type": "function",
    "function": {"name": PROBE, "description": "p", "parameters": {"type": "object", "properties": {}}},
}


CALL_START, CALL_MIDDLE = f'{CALL_OPEN}\n{{"name": "', '", "arguments":'
HERMES_CALL = re.compile(rf'({CALL_OPEN}\s*{{\s*"name":\s*"){PROBE}(",\s*"arguments":)')


NUM_CONTEXT_MESSAGES = 2
"""Messages that stand for all that came before a reply: the first, and the one before it."""
NUM_CACHED_TEXTS, MAX_CACHED_MESSAGES, MAX_CACHED_CHARACTERS = 2048, 8, 8192
"""Texts of short conversations that are remembered, where the template reads nothing but what it is given."""


class ChatTemplate:
    """Renders conversations to text, in which special tokens that messages spell are marked."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, has_hermes_parser: bool, split_special_tokens: bool = True
    ) -> None:
        """Without `split_special_tokens` nothing is marked: what messages spell becomes special tokens."""
        self._tokenizer = tokenizer
        self._jinja = JinjaTemplate(tokenizer)
        self._render_cached = functools.lru_cache(maxsize=NUM_CACHED_TEXTS)(self._render_from_key)
        added = tokenizer.added_tokens_decoder
        special = {token_id: str(token) for token_id, token in added.items() if token.special}
        special |= {i: str(tokenizer.convert_ids_to_tokens(i)) for i in tokenizer.all_special_ids}
        self.special_ids = {text: token_id for token_id, text in special.items() if text not in MARKUP}
        """Text of each special token -> its id."""
        self.special_tokens = SpecialTokens(tokenizer, self.special_ids) if split_special_tokens else None
        longest_first = sorted(self.special_ids, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.has_system = self._shows([Message(role="system", content=PROBE), Message(role="user", content="u")])
        knows_tools = self._shows([Message(role="user", content="u")], [PROBE_TOOL])
        calls = self._probe_calls(knows_tools)
        hermes = None if calls is None else HERMES_CALL.search(calls)
        self.call_start, self.call_middle = (CALL_START, CALL_MIDDLE) if hermes is None else hermes.groups()
        """How a call is written before its name, and between its name and its arguments."""
        self.has_unparsed_calls = has_hermes_parser and knows_tools and hermes is None
        """The template has tools, but writes calls as the parser does not read them."""
        self.has_tools = knows_tools and not self.has_unparsed_calls
        self.has_tool_calls = calls is not None and (hermes is not None or not has_hermes_parser)
        self.end_of_turn = self._probe_end_of_turn()
        """The special token after an assistant's message; None when the next message's header ends the turn."""

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
        messages, tools = self._apply_fallbacks(messages, tools)
        return self._render(messages, tools, variables or {}, has_generation_prompt)

    def render_delta(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str | None:
        """What follows the message whose content is the sentinel; None when it cannot be told."""
        messages, tools = self._apply_fallbacks(messages, tools)
        held = [index for index, message in enumerate(messages) if SENTINEL in message.content]
        if len(held) == 1 and held[0] > NUM_CONTEXT_MESSAGES and self._jinja.is_rendered_from_neighbors(tools):
            near = [messages[0], *messages[held[0] - 1 :]]
            with contextlib.suppress(ValueError):  # the template may miss what was left out
                delta = self.find_delta(self._render(near, tools, variables, True))
                if delta is not None:
                    return delta
        return self.find_delta(self._render(messages, tools, variables, True))

    def _apply_fallbacks(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]]]:
        """What the template lacks, said in messages."""
        if tools and not self.has_tools:
            messages, tools = describe_tools_in_system(messages, tools), ()
        if not self.has_tool_calls:
            messages = write_calls_as_text(messages)
        if not self.has_system:
            messages = merge_system_into_user(messages)
        return messages, tools

    def find_delta(self, text: str) -> str | None:
        """What follows the sentinel, from the special token on that ends the turn; None when it cannot be told.

        Where no token ends a turn, the header of the next message does, and must follow at once.
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
        is_short = (
            len(messages) <= MAX_CACHED_MESSAGES and sum(len(m.content) for m in messages) <= MAX_CACHED_CHARACTERS
        )
        if is_short and self._jinja.is_rendered_from_neighbors(tools):
            frozen = build_cache_key((list(tools), dict(variables), has_generation_prompt))
            if frozen is not None:
                return self._render_cached(tuple(messages), frozen)
        return self._render_uncached(messages, tools, variables, has_generation_prompt)

    def _render_from_key(self, messages: tuple[Message, ...], frozen: bytes) -> str:
        return self._render_uncached(messages, *load_cache_key(frozen))

    def _render_uncached(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        has_generation_prompt: bool,
    ) -> str:
        given: list[Any] = [[message.to_template() for message in messages], list(tools), dict(variables)]
        if self.special_tokens is not None:
            given = self.special_tokens.mark(given)
        shown, shown_tools, shown_variables = given
        try:
            return self._jinja.render(
                shown,
                tools=shown_tools,
                variables=shown_variables,
                has_generation_prompt=has_generation_prompt,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error

    def _shows(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the template renders the messages, with the probe in the text."""
        try:
            return PROBE in self._render(messages, tools, {}, True)
        except ValueError:
            return False

    def _probe_calls(self, knows_tools: bool) -> str | None:
        """How the template shows a call and its result after a question; None when it does not show them."""
        call = ToolCall(call_id="call00000", name=PROBE, arguments='{"a": 1}')
        question = Message(role="user", content="u")
        answer = Message(role="assistant", tool_calls=(call,))
        result = Message(role="tool", content=SENTINEL, tool_call_id="call00000", name=PROBE)
        tools = [PROBE_TOOL] if knows_tools else []
        try:
            before = self._render([question], tools, {}, False)
            text = self._render([question, answer, result], tools, {}, True)
        except ValueError:
            return None
        shown = text.removeprefix(before)
        return shown if PROBE in shown and SENTINEL in shown else None

    def _probe_end_of_turn(self) -> str | None:
        messages = [Message(role="user", content="u"), Message(role="assistant", content=SENTINEL)]
        try:
            text = self._render(messages, (), {}, False)
        except ValueError:
            return None
        found = self._special_pattern.search(text, text.find(SENTINEL))
        return None if found is None else found.group()
