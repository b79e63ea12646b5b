"""POST /v1/responses on the chat endpoint.

Responses are stored with their session, unless `store` is false, so that `previous_response_id` can continue them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tunesmith.rollout.openai_server.chat_completion import PendingChatCompletion
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint, translate_errors
from tunesmith.rollout.openai_server.events import Events
from tunesmith.rollout.openai_server.fields import RequestError
from tunesmith.rollout.openai_server.responses_api.events import ResponseEvents
from tunesmith.rollout.openai_server.responses_api.request import translate_request
from tunesmith.rollout.openai_server.responses_api.response import (
    build_output,
    build_response,
    build_usage,
    get_status,
)
from tunesmith.rollout.recording.recorder import Session
from tunesmith.types import Completion

ChatMessages = list[dict[str, Any]]


class ResponsesApi:
    """Admits Responses requests and stores their conversations."""

    def __init__(self, endpoint: ChatEndpoint) -> None:
        self._endpoint = endpoint
        self._stored: weakref.WeakKeyDictionary[Session, dict[str, ChatMessages]] = weakref.WeakKeyDictionary()
        """Messages up to each stored response, without the instructions."""

    async def admit(self, session: Session, fields: Any) -> PendingResponse:
        with translate_errors():
            chat_fields = translate_request(fields)
            messages = self._find_previous(session, fields) + chat_fields["messages"]
            instructions = fields.get("instructions")
            if instructions is not None and not isinstance(instructions, str):
                raise RequestError("instructions must be text", param="instructions")
        system = [{"role": "system", "content": instructions}] if instructions else []
        stored = self._stored.setdefault(session, {})
        build = partial(PendingResponse, fields=fields, messages=messages, stored=stored)
        return await self._endpoint.admit(session, chat_fields | {"messages": [*system, *messages]}, build=build)

    def _find_previous(self, session: Session, fields: Mapping[str, Any]) -> ChatMessages:
        response_id = fields.get("previous_response_id")
        if response_id is None:
            return []
        stored = self._stored.get(session, {})
        if response_id not in stored:
            message = (
                f"previous_response_id={response_id!r} is no stored response of this API key; send the whole input"
            )
            raise RequestError(message, param="previous_response_id")
        return stored[response_id]


class PendingResponse(PendingChatCompletion):
    """An admitted Responses request: a chat request whose body and events have another form."""

    def __init__(
        self,
        *admitted: Any,
        fields: Mapping[str, Any],
        messages: ChatMessages,
        stored: dict[str, ChatMessages],
        **options: Any,
    ) -> None:
        """`fields`: the request's; `messages`: those of its chat request; `stored`: the session's conversations."""
        super().__init__(*admitted, **options)
        self._fields = fields
        self._messages = messages
        self._stored = stored
        self._response_id = self.build_id("resp")
        self._created = int(time.time())

    def build_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        body = super().build_body(completions)
        (choice,) = body["choices"]
        message, status = choice["message"], get_status(choice["finish_reason"])
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        output = build_output(self._response_id, message, status=status, logprobs=logprobs)
        self._store(message)
        return self._build(status, output, body["usage"], None, message.get("reasoning_content") or "")

    def open_events(self) -> Events:
        return ResponseEvents(self._response_id, self._build, self._store)

    def _build(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Mapping[str, Any] | None,
        error: Mapping[str, Any] | None,
        reasoning: str,
    ) -> dict[str, Any]:
        num_reasoning_tokens = len(self.renderer.encode(reasoning)) if reasoning and usage is not None else 0
        return build_response(
            self._response_id,
            self._fields,
            created=self._created,
            model=self.header.model,
            status=status,
            output=output,
            usage=None if usage is None else build_usage(usage, num_reasoning_tokens=num_reasoning_tokens),
            error=error,
        )

    def _store(self, message: Mapping[str, Any]) -> None:
        if self._fields.get("store") is not False:
            self._stored[self._response_id] = [*self._messages, dict(message)]
