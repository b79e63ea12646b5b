"""Creates the response of one admitted /v1/completions request: client-rendered prompts, unparsed text.

Each prompt is a separate call of the session, and each of its choices a recorded turn, as for chat requests. The text
is not parsed for reasoning or tool calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.chat.parsers import Delta, ReplyParser
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.openai_server.chat_completion import ChoiceStream
from tunesmith.rollout.openai_server.events import ChunkEvents, Events
from tunesmith.rollout.openai_server.request import TextRequest
from tunesmith.rollout.openai_server.response import (
    CompletionHeader,
    TokenLogprobs,
    build_finish_reason,
    build_text_logprobs,
    build_usage,
    list_tokens,
)
from tunesmith.rollout.recording.recorder import Session, SessionCall
from tunesmith.types import Completion, OnTokens


class PendingTextCompletion:
    """An admitted completion request: samples its choices and builds its response."""

    chunk_object = "text_completion"

    def __init__(
        self,
        session: Session,
        renderer: Renderer,
        request: TextRequest,
        calls: Sequence[SessionCall],
        *,
        model_name: str,
    ) -> None:
        self.renderer = renderer
        self.request = request
        self._session = session
        self._calls = calls
        self.header = CompletionHeader(completion_id=f"cmpl-{session.key[:8]}-{calls[0].index}", model=model_name)

    @property
    def num_choices(self) -> int:
        return len(self._calls) * self.request.num_choices

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(call.prompt_ids) for call in self._calls)

    def find_call(self, choice: int) -> SessionCall:
        """The call that a choice belongs to; choices of one prompt are consecutive."""
        return self._calls[choice // self.request.num_choices]

    async def sample_choice(self, choice: int, on_tokens: OnTokens | None = None) -> Completion:
        """Sample one choice."""
        return await self._session.generate(
            self.find_call(choice),
            choice % self.request.num_choices,
            self.request.sampling,
            seed=self.request.seed,
            on_tokens=on_tokens,
        )

    def build_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The body of a complete response."""
        body = self.header.to_json(self.chunk_object)
        body["choices"] = [self._build_full_choice(index, completion) for index, completion in enumerate(completions)]
        body["usage"] = build_usage(self.num_prompt_tokens, completions)
        return body

    def open_choice_stream(self, index: int) -> TextChoiceStream:
        return TextChoiceStream(self, index)

    def open_events(self) -> Events:
        return ChunkEvents()

    def build_parser(self) -> ReplyParser:
        """A parser that only truncates the text at stop strings."""
        return ReplyParser(new_call_id=str, has_reasoning=False, has_tool_calls=False, stop=self.request.sampling.stop)

    def _build_full_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        parser = self.build_parser()
        hidden = self.request.sampling.stop_token_ids
        text = parser.parse(self.renderer.decode(completion.sampled_ids, extra_hidden_ids=hidden)).content
        tokens = list_tokens(completion.sampled_ids, completion.logprobs, completion.top_logprobs)
        reason = build_finish_reason(completion, has_calls=False, is_stopped=parser.is_stopped)
        entropies = completion.entropies or ()
        return self.build_choice(index, text, tokens, entropies, reason=reason, is_first=True)

    def build_choice(
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
        choice = self._pending.build_choice(
            self._index, text, self._tokens, self._entropies, reason=reason, is_first=self._is_first
        )
        self._tokens, self._entropies, self._is_first = [], [], False
        return self._pending.header.to_json(self._pending.chunk_object) | {"choices": [choice]}
