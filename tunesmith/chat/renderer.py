"""Renders conversations to prompt token ids, and parses sampled token ids.

`render` builds the prompt of a conversation with the chat template. `extend` builds the prompt of a conversation that
continues a recorded turn (bridging): the turn's prompt ids, its sampled ids, and the rendered delta. Sampled text is
never tokenized again, so a conversation stays one token sequence even if the template would render the history
differently. `build_parser` and `decode` turn sampled ids into messages and text.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tunesmith.chat.call_probe import SENTINEL
from tunesmith.chat.detokenize import REPLACEMENT, Detokenizer, is_raw_byte, read_byte_level
from tunesmith.chat.memo import MAX_TOTAL_LENGTH, memoize, memoize_value
from tunesmith.chat.messages import MAX_TOOL_LIST_BYTES, NUM_CACHED_TOOL_LISTS, Message, ToolCall
from tunesmith.chat.parsers import REASONING_TAGS, find_reasoning_parser, parse_reply
from tunesmith.chat.parsers.harmony import HARMONY, HarmonyParser
from tunesmith.chat.parsers.hermes import HERMES
from tunesmith.chat.parsers.incremental import IncrementalParser
from tunesmith.chat.parsers.json_calls import JSON
from tunesmith.chat.parsers.reply import THINK, ReplyParser
from tunesmith.chat.special_tokens import ESCAPE
from tunesmith.chat.template import NUM_CACHED_PROMPTS, ChatTemplate
from tunesmith.types import Sampling

logger = logging.getLogger(__name__)

NUM_CACHED_DELTAS, MAX_DELTA_CHARACTERS = 4096, 1024
"""Tokenized deltas cached, and their longest text; tools often return the same short result."""
UNPARSED_CALLS_WARNING = (
    "the chat template writes tool calls in a format that model.tool_call_parser=%s cannot parse; tools are described "
    "in the system message and calls are written as <tool_call> blocks instead"
)
JSON_CALLS_WARNING = (
    "%d replies call a listed tool as a JSON object, and none as model.tool_call_parser=%s (%s) reads calls, "
    "so no tool runs: set model.tool_call_parser: json"
)
NUM_WATCHED_REPLIES = 4
"""Unread JSON calls before the warning; the first call that is read ends the watch."""
NUM_TAIL_IDS, NUM_CACHED_TAILS = 16, 256
"""Last ids of a prompt that are decoded to check whether it opens a <think> block, and how many of their texts are
cached; most prompts end with the same."""


END_OF_REPLY = Message(role="assistant", content=SENTINEL)
"""A reply of which nothing but the end matters."""


class PromptTooLongError(ValueError):
    """The text cannot fit the context however it is tokenized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Input of one rendering: messages, tools and template variables."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: tuple[tuple[str, Any], ...] = ()
    """Chat template variables of the request; they override the renderer's."""
    reply_start: str = ""
    """Text that the reply begins with; it is part of the prompt, without the end of a turn."""
    scope: str = ""
    """Of a request: its tools and variables as text, from `describe_scope`."""


class Renderer:
    """Renders prompts for one tokenizer and parses what its model samples."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        enable_thinking: bool | None = None,
        split_special_tokens: bool = True,
    ) -> None:
        """`auto` chooses the parsers for the formats that the tokenizer's chat template writes."""
        if reasoning_parser == "auto":
            reasoning_parser = find_reasoning_parser(str(tokenizer.chat_template or ""))
        self.reasoning_tags = REASONING_TAGS.get(reasoning_parser, THINK)
        self._tokenizer = tokenizer
        self._tool_call_parser = tool_call_parser
        self._template = ChatTemplate(
            tokenizer,
            tool_call_parser=tool_call_parser,
            split_special_tokens=split_special_tokens,
            extra_markup=HARMONY.markup
            if reasoning_parser == HARMONY.name
            else (self.reasoning_tags.opening, self.reasoning_tags.closing),
        )
        self.call_format = self._template.call_format
        """The format in which the model writes tool calls; None if they are not parsed."""
        self.rendered_call = self._template.rendered_call
        """How the template writes a tool call."""
        self.uses_variable = self._template.uses_variable
        self.is_harmony = reasoning_parser == HARMONY.name or self.call_format is HARMONY
        self._special_tokens = self._template.special_tokens
        self._has_warned = False
        self._num_unread_calls = 0
        self._is_watching = self.call_format is HERMES
        self._variables = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.has_tool_calls = self.call_format is not None
        self.has_reasoning = reasoning_parser in REASONING_TAGS and not self.is_harmony
        self._detokenizer = Detokenizer(tokenizer, hidden_ids=self._template.hidden_ids)
        self.decode = self._detokenizer.decode
        self._decode_tail = functools.lru_cache(maxsize=NUM_CACHED_TAILS)(self.decode)
        self.build_incremental_detokenizer = self._detokenizer.build_incremental
        self._backend = _find_backend(tokenizer)
        self.is_thread_safe = self._backend is not None
        """Whether several threads may tokenize at the same time."""
        self._encode_prompt = memoize(max_entries=NUM_CACHED_PROMPTS, max_length=MAX_TOTAL_LENGTH)(self.encode)
        self._encode_delta = memoize(max_entries=NUM_CACHED_DELTAS, max_length=MAX_DELTA_CHARACTERS)(self.encode)

    def render(self, prompt: Prompt, *, max_tokens: int | None = None) -> tuple[int, ...]:
        """Prompt ids of a conversation, rendered with the chat template.

        Text that cannot fit `max_tokens` tokens raises `PromptTooLongError` before it is tokenized.
        """
        self._warn_once(prompt)
        text = self._template.render(prompt.messages, tools=prompt.tools, variables=self._merge_variables(prompt))
        self._check_length(text, max_tokens)
        return self._encode_prompt(text) + self.encode_content(prompt.reply_start, max_tokens=max_tokens)

    def encode_content(self, text: str, *, max_tokens: int | None = None) -> tuple[int, ...]:
        """Ids of text inside a message; special tokens that it spells are plain text. `max_tokens` as in `render`."""
        if not text:
            return ()
        self._check_length(text, max_tokens)
        return self._encode_delta(self._special_tokens.escape(text))

    def encode_prompt(self, text: str, *, adds_special_tokens: bool, max_tokens: int | None = None) -> tuple[int, ...]:
        """Ids of a prompt that the client rendered; special tokens in it are read as such."""
        self._check_length(text, max_tokens)
        return self._encode_plain(text, adds_special_tokens=adds_special_tokens)

    def extend(
        self,
        prompt: Prompt,
        *,
        num_old: int,
        prompt_ids: tuple[int, ...],
        sampled_ids: tuple[int, ...],
        is_ended: bool,
        appended: str = "",
        max_tokens: int | None = None,
    ) -> tuple[int, ...] | None:
        """Prompt ids of a conversation whose first `num_old` messages end with the reply of a recorded turn.

        `prompt_ids` and `sampled_ids` are the turn's; `is_ended`: the last sampled id is an end-of-sequence token.
        `appended`: text that the message has after the reply, for a reply whose sampled ids are text alone. Returns
        None if the text that the template adds after the reply cannot be determined. `max_tokens` as in `render`.
        """
        delta = self._render_delta(prompt, num_old, appended)
        self._check_length(delta or "", max_tokens)
        delta_ids = () if delta is None else self._encode_delta(delta)
        if appended:
            if not delta_ids or not self._extends_text(sampled_ids, appended):
                return None
        elif not delta_ids or delta_ids[0] not in self._template.special_ids.values():
            return None
        elif sampled_ids[-1:] == delta_ids[:1] or (is_ended and self._template.end_of_turn is not None):
            delta_ids = delta_ids[1:]
        start_ids = self.encode_content(prompt.reply_start, max_tokens=max_tokens)
        return prompt_ids + (sampled_ids + (delta_ids + start_ids))

    def build_call_prefix(
        self, name: str | None, prompt_ids: Sequence[int], *, has_grammar: bool = False
    ) -> tuple[str, tuple[int, ...]]:
        """Text and ids of the start of a reply that must be a tool call, with the function `name` if given.

        With `has_grammar` the arguments follow from a grammar, and the prefix contains none of them. If the prompt ends
        in an open <think>, the prefix closes it first.
        """
        call = self.rendered_call
        text = call.start
        if name is not None:
            escaped = self._special_tokens.escape(name)
            text += json.dumps(escaped, ensure_ascii=False)[1:-1] + (call.separator if has_grammar else call.middle)
        if self.is_reasoning_open(prompt_ids):
            text = f"\n{self.reasoning_tags.closing}\n\n{text}"
        return self._special_tokens.unescape(text), self.encode(text)

    def build_parser(
        self,
        prompt_ids: Sequence[int],
        *,
        has_tools: bool,
        has_reasoning: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        **frame: Any,
    ) -> IncrementalParser:
        """A parser for the reply to a prompt; without `has_tools`, nothing is parsed as a tool call, and without
        `has_reasoning` reasoning is content.

        `tools`: those of the request; some formats need their schemas to tell text from numbers. `frame`: arguments of
        `IncrementalParser`. The reasoning of harmony is a channel of its own, so it stays reasoning.
        """
        if self.is_harmony:
            return HarmonyParser(has_tool_calls=self.call_format is HARMONY and has_tools, **frame)
        return ReplyParser(
            has_reasoning=self.has_reasoning and has_reasoning,
            is_reasoning_open=has_reasoning and self.is_reasoning_open(prompt_ids),
            has_tool_calls=self.has_tool_calls and has_tools,
            reasoning_tags=self.reasoning_tags,
            call_format=self.call_format or HERMES,
            tools=tools,
            **frame,
        )

    def watch_calls(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> None:
        """Warn once if the first replies call tools in JSON that the parser does not read; `message` is parsed."""
        if not self._is_watching or not tools:
            return
        if message.tool_calls:
            self._is_watching = False
        elif '"arguments"' in message.content:
            read = parse_reply(message.content, JSON, has_reasoning=False, tools=tools)
            self._num_unread_calls += bool(read.tool_calls)
            if self._num_unread_calls == NUM_WATCHED_REPLIES:
                self._is_watching = False
                logger.warning(JSON_CALLS_WARNING, NUM_WATCHED_REPLIES, self._tool_call_parser, HERMES.name)

    def limit_to_one_call(self, sampling: Sampling) -> Sampling:
        """Sampling parameters that stop after one tool call, if the format has a tag that ends a call."""
        close = None if self.call_format is None else self.call_format.close
        if close is None:
            return sampling
        token_id = self._template.special_ids.get(close)
        if token_id is not None:
            return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, token_id))
        return replace(sampling, stop=(*sampling.stop, close))

    def decode_text(self, ids: Sequence[int], *, has_reasoning: bool) -> str:
        """Text of sampled ids after their reasoning, markup included; empty if an id is a special token."""
        text = self._detokenizer.decode_text(ids) or ""
        return text.partition(self.reasoning_tags.closing)[2] if has_reasoning else text

    def format_token(self, token_id: int) -> str:
        """Text of one token, special or not."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def encode_token(self, token_id: int) -> bytes:
        """Bytes of one token, special or not, also of a part of a UTF-8 character, which has no text."""
        text = self.format_token(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return bytes.fromhex(token[3:5]) if is_raw_byte(token) else read_byte_level(token)

    @functools.cached_property
    def added_tokens(self) -> dict[str, int]:
        """Text of each added token, special or not -> its id."""
        return {str(token): token_id for token_id, token in self._tokenizer.added_tokens_decoder.items()}

    def may_reason(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the model decides to reason: the template has a switch, and the prompt does not close <think>."""
        if not (self.has_reasoning and self.uses_variable("enable_thinking")):
            return False
        return not self._ends_in(prompt_ids, self.reasoning_tags.closing)

    def is_reasoning_open(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends in an open reasoning tag, so that the reply starts with reasoning."""
        return self.has_reasoning and self._ends_in(prompt_ids, self.reasoning_tags.opening)

    def _ends_in(self, prompt_ids: Sequence[int], tag: str) -> bool:
        return self._decode_tail(tuple(prompt_ids[-NUM_TAIL_IDS:])).rstrip().endswith(tag)

    def _merge_variables(self, prompt: Prompt) -> dict[str, Any]:
        return {**self._variables, **dict(prompt.variables)}

    def _warn_once(self, prompt: Prompt) -> None:
        if prompt.tools and self._template.has_unparsed_calls and not self._has_warned:
            self._has_warned = True
            logger.warning(UNPARSED_CALLS_WARNING, self._tool_call_parser)

    def _extends_text(self, sampled_ids: Sequence[int], appended: str) -> bool:
        """Whether the ids of the appended text, encoded by itself, add just this text to the sampled ids."""
        tail_ids = tuple(sampled_ids[-NUM_TAIL_IDS:])
        return self.decode(tail_ids + self.encode_content(appended)) == self.decode(tail_ids) + appended

    def _render_delta(self, prompt: Prompt, num_old: int, appended: str) -> str | None:
        """Text after message `num_old - 1`, the reply, from the appended text or the special token that ends it.

        A sentinel marks the end of the reply, see `_build_attempts`.
        """
        self._warn_once(prompt)
        variables = self._merge_variables(prompt)
        old, reply, new = prompt.messages[: num_old - 1], prompt.messages[num_old - 1], prompt.messages[num_old:]
        for attempt in self._build_attempts(reply, appended):
            try:
                delta = self._template.render_delta(
                    (*old, attempt, *new), tools=prompt.tools, variables=variables, appended=appended
                )
            except ValueError:
                continue
            if delta is not None:
                text = self._special_tokens.unescape(delta)
                if all(_is_rendered(message, text) for message in new):
                    return delta
        return None

    def _build_attempts(self, reply: Message, appended: str) -> list[Message]:
        """The reply with a sentinel in place of its end, before what is appended to it.

        The sentinel replaces the content; tool calls are kept, with empty arguments, for templates that match results
        to calls. For templates that omit content next to calls, or write it in a message of its own, the sentinel is
        the argument of the last call. A last attempt leaves the calls out.
        """
        calls = [ToolCall(call_id=call.call_id, name=call.name, arguments="{}") for call in reply.tool_calls]
        content = Message(role="assistant", content=SENTINEL + appended) if appended else END_OF_REPLY
        if not calls:
            return [content]
        last = replace(calls[-1], arguments=json.dumps({"a": SENTINEL}))
        in_arguments = Message(role="assistant", tool_calls=(*calls[:-1], last))
        return [in_arguments] if self.is_harmony else [replace(content, tool_calls=tuple(calls)), in_arguments, content]

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of text rendered by the template."""
        if ESCAPE in text:
            with _refuse_surrogates():
                return tuple(self._special_tokens.encode(text))
        return self._encode_plain(text)

    def _encode_plain(self, text: str, *, adds_special_tokens: bool = False) -> tuple[int, ...]:
        backend = self._backend
        with _refuse_surrogates():
            if backend is None or backend.truncation or backend.padding or backend.encode_special_tokens:
                return tuple(self._tokenizer.encode(text, add_special_tokens=adds_special_tokens))
            # the batch call computes no offsets, and other threads can run meanwhile
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=adds_special_tokens)
            return tuple(encoding.ids)

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
def _refuse_surrogates() -> Iterator[None]:
    """Raise `ValueError` instead of the tokenizer's `TypeError` for text that UTF-8 cannot encode."""
    try:
        yield
    except TypeError as error:
        raise ValueError("the text contains lone surrogates, which cannot be encoded as UTF-8") from error


def _find_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The Rust tokenizer, if the Python class around it does not change how text is encoded; else None."""
    is_plain = all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None)
        for name in ("encode", "_encode_plus")
    )
    return tokenizer.backend_tokenizer if is_plain and not tokenizer.split_special_tokens else None


def _is_rendered(message: Message, text: str) -> bool:
    """Whether the message's content is in the text, verbatim or as JSON; templates may move, merge or drop messages."""
    content = message.content.strip()
    return message.role == "assistant" or content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


MAX_COMPOSED = 4
"""Most characters that Unicode normalization (NFC, NFKC) composes into one."""
CHARACTERS_OF_ONE = {
    "NFC": MAX_COMPOSED, "NFKC": MAX_COMPOSED, "NFD": 1, "NFKD": 1, "Prepend": 1, "Replace": 1, "Sequence": 1,
    "ByteLevel": 1, "Digits": 1, "Split": 1, "Metaspace": 1, "Punctuation": 1,
}  # fmt: skip
"""Normalizers and pre-tokenizers that drop no text -> how many characters they may merge into one."""
BYTES_AS_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def find_longest_token(tokenizer: Tokenizer) -> int | None:
    """Upper bound on the characters of a text that become one token; None if there is no known bound."""
    parts = [part for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
    steps = [step for part in parts for step in _iter_steps(json.loads(part.__getstate__()))]
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps) and vocabulary.keys() >= set(
        ByteLevel.alphabet()
    )
    has_bytes = getattr(tokenizer.model, "byte_fallback", False) and vocabulary.keys() >= BYTES_AS_TOKENS
    is_complete = type(tokenizer.model).__name__ == "BPE" and (is_byte_level or has_bytes)
    if not is_complete or not all(map(_drops_nothing, steps)):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None
    return max(map(len, vocabulary)) * max((CHARACTERS_OF_ONE[step["type"]] for step in steps), default=1)


def _iter_steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield step
    for nested in step.get("normalizers") or step.get("pretokenizers") or ():
        yield from _iter_steps(nested)


def _drops_nothing(step: dict[str, Any]) -> bool:
    if step["type"] not in CHARACTERS_OF_ONE or step.get("behavior") == "Removed":
        return False
    if step["type"] != "Replace":
        return True
    replaced = step["pattern"].get("String")
    return replaced is not None and len(step["content"]) >= len(replaced)


@memoize_value(max_entries=NUM_CACHED_TOOL_LISTS, max_length=MAX_TOOL_LIST_BYTES)
def describe_scope(tools_and_variables: list[Any]) -> str:
    """The tools and template variables of a prompt as text: only a call with the same ones extends a recorded turn."""
    return json.dumps(tools_and_variables, sort_keys=True, default=str)
