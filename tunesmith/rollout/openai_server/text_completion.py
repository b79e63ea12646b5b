"""Creates the response of one admitted /v1/completions request: client-rendered prompts, unparsed text.

Each prompt is a separate call of the session, and each of its choices a recorded turn, as for chat requests. The text
is not parsed for reasoning or tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.chat.parsers import Delta, ReplyParser
from tunesmith.rollout.openai_server.chat_completion import ChoiceStream, PendingCompletion
from tunesmith.rollout.openai_server.request import TextRequest
from tunesmith.rollout.openai_server.response import (
    TokenLogprobs,
    build_finish_reason,
    build_text_logprobs,
    list_tokens,
)
from tunesmith.types import Completion


class PendingTextCompletion(PendingCompletion[TextRequest]):
    """An admitted completion request."""

    id_prefix, body_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def open_choice_stream(self, index: int) -> TextChoiceStream:
        return TextChoiceStream(self, index)

    def build_parser(self) -> ReplyParser:
        """A parser that only truncates the text at stop strings."""
        return ReplyParser(new_call_id=str, has_reasoning=False, has_tool_calls=False, stop=self.request.sampling.stop)

    def build_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        parser = self.build_parser()
        hidden = self.request.sampling.stop_token_ids
        text = parser.parse(self.renderer.decode(completion.sampled_ids, extra_hidden_ids=hidden)).content
        tokens = list_tokens(completion.sampled_ids, completion.logprobs, completion.top_logprobs)
        reason = build_finish_reason(completion, has_calls=False, is_stopped=parser.is_stopped)
        entropies = completion.entropies or ()
        return self.build_part(index, text, tokens, entropies, reason=reason, is_first=True)

    def build_part(
        self,
        index: int,
        text: str,
        tokens: Sequence[TokenLogprobs],
        entropies: Sequence[float],
        *,
        reason: str | None,
        is_first: bool,
    ) -> dict[str, Any]:
        """Fields of a choice, or of one stream chunk of it."""
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        if self.request.has_logprobs:
            has_top = self.request.sampling.top_logprobs > 0
            choice["logprobs"] = build_text_logprobs(tokens, self.renderer.format_token, has_top=has_top)
        if self.request.sampling.return_entropy:
            choice["entropies"] = list(entropies)
        if self.request.has_token_ids:
            choice["token_ids"] = [token_id for token_id, *_ in tokens]
            if is_first:
                choice["prompt_token_ids"] = list(self.find_call(index).prompt_ids)
        return choice


class TextChoiceStream(ChoiceStream):
    """Turns the tokens of one choice into text completion chunks."""

    def __init__(self, pending: PendingTextCompletion, index: int) -> None:
        hidden = pending.request.sampling.stop_token_ids
        super().__init__(pending.renderer, pending.build_parser(), index, hidden=hidden)
        self._pending = pending

    def _build_next(self, delta: Delta) -> dict[str, Any] | None:
        return self._build_chunk(delta.content) if delta.content else None

    def finish(self, completion: Completion) -> list[dict[str, Any]]:
        rest = self._parser.feed(self._detokenizer.finish()).content + self._parser.finish().content
        reason = build_finish_reason(completion, has_calls=False, is_stopped=self._parser.is_stopped)
        return [self._build_chunk(rest, reason)]

    def _build_chunk(self, text: str, reason: str | None = None) -> dict[str, Any]:
        choice = self._pending.build_part(
            self._index, text, self._tokens, self._entropies, reason=reason, is_first=self._is_first
        )
        self._tokens, self._entropies, self._is_first = [], [], False
        return self._pending.header.to_json(self._pending.chunk_object) | {"choices": [choice]}
