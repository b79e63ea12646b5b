"""An endpoint that also keeps the requests of a rollout, admitted and refused, for checks of a workflow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tunesmith.rollout.openai_server.chat_completion import PendingChatCompletion
from tunesmith.rollout.openai_server.endpoint import ApiError, ChatEndpoint
from tunesmith.rollout.openai_server.text_completion import PendingTextCompletion
from tunesmith.rollout.recording.recorder import Recorder, Session, SessionCall


class LoggedEndpoint(ChatEndpoint):
    """A `ChatEndpoint` with a log; used for one rollout at a time."""

    def __init__(self, recorder: Recorder, *, model_name: str) -> None:
        super().__init__(recorder, model_name=model_name)
        self.calls: list[SessionCall] = []
        """Admitted chat calls, in the order in which they were admitted."""
        self.refused: list[ApiError] = []

    @contextlib.contextmanager
    def _log_refusal(self) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            self.refused.append(error)
            raise

    def find_session(self, key: str | None) -> Session:
        with self._log_refusal():
            return super().find_session(key)

    async def admit(self, session: Session, fields: Any) -> PendingChatCompletion:
        with self._log_refusal():
            pending = await super().admit(session, fields)
        self.calls.append(pending.call)
        return pending

    async def admit_text(self, session: Session, fields: Any) -> PendingTextCompletion:
        with self._log_refusal():
            return await super().admit_text(session, fields)
