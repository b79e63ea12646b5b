"""POST /v1/messages and /v1/messages/count_tokens on the chat endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tunesmith.rollout.openai_server.chat_completion import PendingChatCompletion
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint, translate_errors
from tunesmith.rollout.openai_server.events import Events
from tunesmith.rollout.openai_server.messages_api.events import MessageEvents
from tunesmith.rollout.openai_server.messages_api.request import translate_counted_request, translate_request
from tunesmith.rollout.openai_server.messages_api.response import build_content, build_message, build_stop, build_usage
from tunesmith.rollout.recording.recorder import Session
from tunesmith.types import Completion


class MessagesApi:
    """Admits Messages requests, and counts the tokens of their prompts."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint

    async def admit(self, session: Session, fields: Any) -> PendingMessage:
        with translate_errors():
            chat_fields = translate_request(fields, self._endpoint.recorder.renderer.uses_variable)
        return await self._endpoint.admit(session, chat_fields, build=PendingMessage)

    async def count_tokens(self, session: Session, fields: Any) -> dict[str, Any]:
        """Number of prompt tokens that a request with these fields would have; nothing is sampled or recorded."""
        with translate_errors():
            chat_fields = translate_counted_request(fields, self._endpoint.recorder.renderer.uses_variable)
        return {"input_tokens": await self._endpoint.count_prompt_tokens(session, chat_fields)}


class PendingMessage(PendingChatCompletion):
    """An admitted Messages request: a chat request whose body and events have another form."""

    def build_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        body = super().build_body(completions)
        (choice,) = body["choices"]
        return build_message(
            self.build_id("msg"),
            model=self.header.model,
            content=build_content(choice["message"]),
            usage=build_usage(body["usage"]),
            stop=build_stop(choice),
        )

    def open_events(self) -> Events:
        return MessageEvents(self.build_id("msg"), model=self.header.model, num_prompt_tokens=self.num_prompt_tokens)
