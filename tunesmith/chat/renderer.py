"""Messages <-> token ids.

`render` makes the prompt of a conversation; `extend` makes the prompt of a conversation that goes on from a recorded
turn: the turn's prompt, the tokens that were sampled, and the rendered rest. Sampled text is never tokenized again, so
a conversation stays one sequence even where the template would render its past differently. `build_parser` and
`decode` read what was sampled.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunesmith.chat.detokenize import Detokenizer, IncrementalDetokenizer
from tunesmith.chat.memo import memoize
from tunesmith.chat.messages import Message, ToolCall
from tunesmith.chat.parsers import THINK_CLOSE, THINK_OPEN, ReplyParser
from tunesmith.chat.special_tokens import MARK, encode_text
from tunesmith.chat.template import SENTINEL, ChatTemplate
from tunesmith.chat.token_length import find_longest_token

logger = logging.getLogger(__name__)

NUM_CACHED_PROMPTS = 512
"""Ids of rendered prompts kept: the runs of a group begin with the same one."""
NUM_CACHED_DELTAS, MAX_DELTA_CHARACTERS = 4096, 1024
"""Ids kept of what follows a reply, and how long their texts may be: tools often give the same short result."""
UNPARSED_CALLS_WARNING = (
    "the chat template writes tool calls in a form that the hermes parser does not read; tools are described in the "
    "system message and calls are written as <tool_call> blocks instead"
)
NUM_TAIL_IDS = 16
"""Ids at a prompt's end that are read to see whether it opens the model's reasoning."""


class PromptTooLongError(ValueError):
    """Text that cannot fit the context, whatever its tokens are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a request asks to be rendered."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: tuple[tuple[str, Any], ...] = ()
    """Chat template variables of the request, which override the renderer's."""

    @property
    def num_characters(self) -> int:
        """Of what the messages say."""
        return sum(len(message.content) + len(message.reasoning or "") for message in self.messages)


class Renderer:
    """Renders for one tokenizer and reads what its model samples."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool_call_parser: str = "hermes",
        reasoning_parser: str = "deepseek_r1",
        enable_thinking: bool | None = None,
        split_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(
            tokenizer, has_hermes_parser=tool_call_parser == "hermes", split_special_tokens=split_special_tokens
        )
        self._special_tokens = self._template.special_tokens
        self._has_warned = False
        self._variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.has_tool_calls = tool_call_parser == "hermes"
        self.has_reasoning = reasoning_parser == "deepseek_r1"
        self._detokenizer = Detokenizer(tokenizer, hidden_ids=self._template.special_ids.values())
        self._backend = _find_backend(tokenizer)
        self.has_threads = self._backend is not None
        """Whether several threads may tokenize at once."""
        self._encode_prompt = functools.lru_cache(maxsize=NUM_CACHED_PROMPTS)(self.encode)
        self._encode_delta = memoize(max_entries=NUM_CACHED_DELTAS, max_length=MAX_DELTA_CHARACTERS)(self.encode)
        self._is_reasoning_open = functools.lru_cache(maxsize=NUM_CACHED_PROMPTS)(self._ends_in_reasoning)

    def reads(self, variable: str) -> bool:
        """Whether the chat template mentions a variable."""
        return self._template.reads(variable)

    def render(self, prompt: Prompt, *, max_tokens: int | None = None) -> tuple[int, ...]:
        """Prompt ids of a conversation, by the tokenizer's chat template.

        Text that is too long for `max_tokens` tokens of any length is a `PromptTooLongError` and is not tokenized.
        """
        text = self._render_text(prompt)
        self._check_length(text, max_tokens)
        return self._encode_prompt(text)

    def encode_prompt(self, text: str, *, adds_special_tokens: bool, max_tokens: int | None = None) -> tuple[int, ...]:
        """Ids of a prompt that a client rendered; special tokens that it spells are special tokens."""
        self._check_length(text, max_tokens)
        return self._encode_plain(text, adds_special_tokens=adds_special_tokens)

    def extend(
        self,
        prompt: Prompt,
        *,
        num_old: int,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        is_ended: bool,
        max_tokens: int | None = None,
    ) -> tuple[int, ...] | None:
        """Prompt ids of a conversation whose first `num_old` messages end in the reply of a recorded turn.

        `prompt_ids` and `sampled_ids` are the turn's; `is_ended` says that the last of these ended the reply. None
        when the template cannot tell what it adds after the reply. `max_tokens` is as for `render`.
        """
        delta = self._render_delta(prompt, num_old)
        self._check_length(delta or "", max_tokens)
        delta_ids = () if delta is None else self._encode_delta(delta)
        if not delta_ids or delta_ids[0] not in self._template.special_ids.values():
            return None
        is_end_sampled = bool(sampled_ids) and sampled_ids[-1] == delta_ids[0]
        if is_end_sampled or (is_ended and self._template.end_of_turn is not None):
            delta_ids = delta_ids[1:]
        return (*prompt_ids, *sampled_ids, *delta_ids)

    def build_call_prefix(self, name: str | None, prompt_ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Text and ids of the start of a reply that must be a tool call; with a name, of a call to it.

        A reply whose prompt opened its reasoning closes it first.
        """
        text = self._template.call_start
        if name is not None:
            shown = name if self._special_tokens is None else self._special_tokens.mark(name)
            text += json.dumps(shown, ensure_ascii=False)[1:-1] + self._template.call_middle
        if self.is_reasoning_open(prompt_ids):
            text = f"\n{THINK_CLOSE}\n\n{text}"
        return self._unmark(text), self.encode(text)

    def build_parser(
        self,
        prompt_ids: Sequence[int],
        *,
        new_call_id: Callable[[], str],
        has_tools: bool,
        is_single_call: bool = False,
        stop: Sequence[str] = (),
        prefix: str = "",
    ) -> ReplyParser:
        """A parser of the reply to a prompt; without tools nothing is read as a call."""
        return ReplyParser(
            new_call_id=new_call_id,
            has_reasoning=self.has_reasoning,
            is_reasoning_open=self.is_reasoning_open(prompt_ids),
            has_tool_calls=self.has_tool_calls and has_tools,
            is_single_call=is_single_call,
            stop=stop,
            prefix=prefix,
        )

    def decode(self, ids: Sequence[int], *, extra_hidden_ids: Collection[int] = ()) -> str:
        """Text of sampled ids without special tokens."""
        return self._detokenizer.decode(ids, extra_hidden_ids=extra_hidden_ids)

    def build_incremental_detokenizer(self, *, extra_hidden_ids: Collection[int] = ()) -> IncrementalDetokenizer:
        """Decodes ids one at a time to the same text."""
        return self._detokenizer.build_incremental(extra_hidden_ids=extra_hidden_ids)

    def format_token(self, token_id: int) -> str:
        """Text of one token, special or not."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def is_reasoning_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends in an opened <think>, so that the reply begins with reasoning."""
        return self.has_reasoning and self._is_reasoning_open(tuple(prompt_ids[-NUM_TAIL_IDS:]))

    def _ends_in_reasoning(self, tail_ids: tuple[int, ...]) -> bool:
        return self.decode(tail_ids).rstrip().endswith(THINK_OPEN)

    def _render_text(self, prompt: Prompt) -> str:
        self._warn_once(prompt)
        return self._template.render(prompt.messages, tools=prompt.tools, variables=self._merge_variables(prompt))

    def _merge_variables(self, prompt: Prompt) -> dict[str, Any]:
        return {**self._variables, **dict(prompt.variables)}

    def _warn_once(self, prompt: Prompt) -> None:
        if prompt.tools and self._template.has_unparsed_calls and not self._has_warned:
            self._has_warned = True
            logger.warning(UNPARSED_CALLS_WARNING)

    def _render_delta(self, prompt: Prompt, num_old: int) -> str | None:
        """Text from the special token on that follows message `num_old - 1`, the reply.

        The reply is replaced by a sentinel. Its calls are kept, with empty arguments, for templates that relate
        results to calls; templates that show no content beside calls are asked again without them.
        """
        self._warn_once(prompt)
        variables = self._merge_variables(prompt)
        old, reply, new = prompt.messages[: num_old - 1], prompt.messages[num_old - 1], prompt.messages[num_old:]
        calls = tuple(ToolCall(call_id=call.call_id, name=call.name, arguments="{}") for call in reply.tool_calls)
        for kept in [calls, ()] if calls else [()]:
            attempt = Message(role="assistant", content=SENTINEL, tool_calls=kept)
            try:
                delta = self._template.render_delta((*old, attempt, *new), tools=prompt.tools, variables=variables)
            except ValueError:
                continue
            if delta is not None:
                text = self._unmark(delta)
                if all(_is_shown(message, text) for message in new):
                    return delta
        return None

    def _unmark(self, text: str) -> str:
        return text if self._special_tokens is None else self._special_tokens.unmark(text)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text that the template rendered."""
        if self._special_tokens is not None and MARK in text:
            with _refused_surrogates():
                return tuple(self._special_tokens.encode(text))
        return self._encode_plain(text)

    def _encode_plain(self, text: str, *, adds_special_tokens: bool = False) -> tuple[int, ...]:
        backend = self._backend
        with _refused_surrogates():
            if backend is None or backend.truncation or backend.padding or backend.encode_special_tokens:
                return tuple(self._tokenizer.encode(text, add_special_tokens=adds_special_tokens))
            return tuple(encode_text(backend, text, adds_special_tokens=adds_special_tokens))

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None or len(text) <= max_tokens or self._longest_token is None:
            return
        if len(text) > max_tokens * self._longest_token:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, which cannot fit {max_tokens} tokens of at most "
                f"{self._longest_token} characters"
            )

    @functools.cached_property
    def _longest_token(self) -> int | None:
        return None if self._backend is None else find_longest_token(self._backend)


@contextlib.contextmanager
def _refused_surrogates() -> Iterator[None]:
    """Text that UTF-8 cannot hold is a `ValueError`, not the tokenizer's `TypeError`."""
    try:
        yield
    except TypeError as error:
        raise ValueError("the messages hold lone surrogates, which are not text") from error


def _find_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What the tokenizer encodes text with, where it adds nothing of its own; else None."""
    is_plain = all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None)
        for name in ("encode", "_encode_plus")
    )
    return tokenizer.backend_tokenizer if is_plain and not tokenizer.split_special_tokens else None


def _is_shown(message: Message, text: str) -> bool:
    """Whether what the model is told is in the text, as it is or in JSON; templates hoist, merge and drop messages."""
    content = message.content.strip()
    return message.role == "assistant" or content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text
