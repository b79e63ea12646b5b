"""Chat completions, whatever they are reached by: request fields in, answer out.

The HTTP app and the in-process client are thin skins over this. What a request asks for is honoured or refused with a
reason. Every error that a client may see is an `ApiError` with the status it has over HTTP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tunesmith.errors import EngineError
from tunesmith.rollout.answer import Answer, answer_at_once
from tunesmith.rollout.recorder import Recorder, SamplingRefusedError, Session, SessionClosedError
from tunesmith.rollout.request import RequestError, parse_request

NO_KEY = "no API key: use the key of the trajectory as the API key, or /t/<key>/v1 as the base URL"
CLOSED = "the API key belongs to no open trajectory: it is wrong, or its trajectory has ended"


class ApiError(Exception):
    """A request that gets no answer, and why."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        """The request field at fault."""


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Errors of a request in the API's terms."""
    try:
        yield
    except RequestError as error:
        raise ApiError(404 if error.param == "model" else 400, str(error), param=error.param) from error
    except SamplingRefusedError as error:
        raise ApiError(400, str(error)) from error
    except SessionClosedError as error:
        raise ApiError(401, CLOSED) from error
    except EngineError as error:
        raise ApiError(500, f"the engine failed: {error}") from error


class ChatEndpoint:
    """Chat completions over one engine's sessions."""

    def __init__(self, recorder: Recorder, *, model_name: str) -> None:
        self.recorder = recorder
        self.model_name = model_name

    def find_session(self, key: str | None) -> Session:
        session = None if key is None else self.recorder.find_session(key)
        if session is None:
            raise ApiError(401, NO_KEY if key is None else CLOSED)
        return session

    def admit(self, session: Session, fields: Any) -> Answer:
        """Check a request and take it in; raises `ApiError` when it cannot be honoured."""
        renderer = self.recorder.renderer
        with translate_errors():
            request = parse_request(fields, session.sampling, template_reads=renderer.reads)
            if request.model not in (None, self.model_name):
                here = f"there is no model {request.model!r} here; this endpoint serves {self.model_name!r}"
                raise RequestError(here, param="model")
            if request.tool_choice == "required" and not renderer.has_tool_calls:
                raise RequestError("tool_choice needs a tool call parser; the run has none", param="tool_choice")
            try:
                call = session.admit(request.prompt)
            except ValueError as error:
                raise RequestError(str(error), param="messages") from error
        return Answer(session, renderer, request, call, model_name=self.model_name)

    async def complete(self, key: str, fields: Any) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        answer = self.admit(self.find_session(key), fields)
        with translate_errors():
            return await answer_at_once(answer)
