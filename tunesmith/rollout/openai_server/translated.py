"""A request of another API as a chat completion: everything but the form of body and events is the chat request's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tunesmith.rollout.openai_server.chat_completion import ChatChoiceStream, PendingChatCompletion
from tunesmith.rollout.openai_server.request import ChatRequest, RequestError
from tunesmith.types import Completion, OnTokens


class TranslatedCompletion:
    """Delegates to an admitted chat request; sub-classes add `build_body` and `open_events`."""

    def __init__(self, chat: PendingChatCompletion) -> None:
        self.chat = chat
        self.header = chat.header
        self.chunk_object = chat.chunk_object

    @property
    def request(self) -> ChatRequest:
        return self.chat.request

    @property
    def num_choices(self) -> int:
        return self.chat.num_choices

    @property
    def num_prompt_tokens(self) -> int:
        return self.chat.num_prompt_tokens

    async def sample_choice(self, choice: int, on_tokens: OnTokens | None = None) -> Completion:
        return await self.chat.sample_choice(choice, on_tokens)

    def open_choice_stream(self, index: int) -> ChatChoiceStream:
        return self.chat.open_choice_stream(index)

    def build_chat_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self.chat.build_body(completions)

    def count_tokens(self, text: str) -> int:
        return len(self.chat.renderer.encode(text))


def check_fields(body: Any, known: Mapping[str, tuple[Any, ...] | None]) -> dict[str, Any]:
    """The fields of a request that are not null.

    `known`: field -> its only accepted values, or None for a field that is read. Other fields and values are refused.
    """
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    given = {key: value for key, value in body.items() if value is not None}
    for key, value in given.items():
        if key not in known:
            raise RequestError(f"{key} is not supported by this endpoint; leave it out", param=key)
        allowed = known[key]
        if allowed is not None and value not in allowed:
            values = ", ".join(map(repr, allowed)) or "none"
            raise RequestError(f"{key}={value!r:.80} is not supported by this endpoint; allowed: {values}", param=key)
    return given


def read_list(value: Any, param: str) -> list[dict[str, Any]]:
    """A list of objects."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise RequestError(f"{param} must be a list of objects", param=param.partition("[")[0])
    return value


def read_text(value: Any, where: str, types: Sequence[str], *, separator: str = "\n") -> str:
    """Text, or the joined texts of a list of parts of the given types."""
    if isinstance(value, str):
        return value
    texts = []
    for part in read_list(value, where):
        kind = part.get("type")
        if kind not in types:
            raise RequestError(f"{where} has a part of type {kind!r}; allowed: {', '.join(types)}", param=_root(where))
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(f"{where} has a part without text", param=_root(where))
        texts.append(text)
    return separator.join(texts)


def _root(where: str) -> str:
    return where.partition("[")[0].partition(".")[0]
