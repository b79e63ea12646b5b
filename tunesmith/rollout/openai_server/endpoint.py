"""Chat completions, whatever they are reached by: request fields in, answer out.

The HTTP app and the in-process client are thin skins over this. What a request asks for is honoured or refused with a
reason. Every error that a client may see is an `ApiError` with the status it has over HTTP.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

from tunesmith.chat.client import CONTEXT_LENGTH_EXCEEDED
from tunesmith.chat.renderer import PromptTooLongError
from tunesmith.errors import EngineError
from tunesmith.rollout.openai_server.chat_completion import PendingChatCompletion, create_completion
from tunesmith.rollout.openai_server.request import RequestError, parse_request, parse_text_request
from tunesmith.rollout.openai_server.text_completion import PendingTextCompletion
from tunesmith.rollout.recorder import Recorder, SamplingRefusedError, Session, SessionCall, SessionClosedError

NO_KEY = "no API key: use the key of the trajectory as the API key, or /t/<key>/v1 as the base URL"
CLOSED = "the API key belongs to no open trajectory: it is wrong, or its trajectory has ended"


class ContextLengthError(RequestError):
    """The prompt leaves no room for a token."""


class ApiError(Exception):
    """A request that gets no answer, and why."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        """What clients tell this error by, where the status does not say it."""
        self.param = param
        """The request field at fault."""


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Errors of a request in the API's terms."""
    try:
        yield
    except ContextLengthError as error:
        raise ApiError(400, str(error), param=error.param, code=CONTEXT_LENGTH_EXCEEDED) from error
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

    def describe_model(self, name: str | None = None) -> dict[str, Any]:
        """What clients are told of the model; `name` is which one they ask for."""
        with translate_errors():
            self._check_model(name)
        card = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "tunesmith"}
        return card | {"max_model_len": self.recorder.engine.max_model_len}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name):
            here = f"there is no model {name!r} here; this endpoint serves {self.model_name!r}"
            raise RequestError(here, param="model")

    async def admit(self, session: Session, fields: Any) -> PendingChatCompletion:
        """Check a chat request and take it in; raises `ApiError` when it cannot be honoured."""
        renderer = self.recorder.renderer
        with translate_errors():
            request = parse_request(fields, session.sampling, uses_variable=renderer.uses_variable)
            self._check_model(request.model)
            if request.tool_choice == "required" and not renderer.has_tool_calls:
                raise RequestError("tool_choice needs a tool call parser; the run has none", param="tool_choice")
            call = await self._take_in(session, session.admit(request.prompt), param="messages")
            answer = PendingChatCompletion(session, renderer, request, call, model_name=self.model_name)
            self._check_context(session, len(answer.prompt_ids), param="messages")
        return answer

    async def admit_text(self, session: Session, fields: Any) -> PendingTextCompletion:
        """As `admit`, for a request that gives its prompts as text or token ids."""
        with translate_errors():
            request = parse_text_request(fields, session.sampling)
            self._check_model(request.model)
            calls = []
            for text in request.prompts:
                admitted = session.admit_text(text, adds_special_tokens=request.adds_special_tokens)
                calls.append(await self._take_in(session, admitted, param="prompt"))
            for call in calls:
                self._check_context(session, len(call.prompt_ids), param="prompt")
        return PendingTextCompletion(session, self.recorder.renderer, request, calls, model_name=self.model_name)

    async def _take_in(
        self, session: Session, admitted: Coroutine[Any, Any, SessionCall], *, param: str
    ) -> SessionCall:
        """What the session makes of a prompt."""
        try:
            return await admitted
        except PromptTooLongError as error:
            session.num_overlong += 1
            raise ContextLengthError(self._describe_context(str(error)), param=param) from error
        except ValueError as error:
            raise RequestError(str(error), param=param) from error

    def _check_context(self, session: Session, num_tokens: int, *, param: str) -> None:
        """Refuse a prompt after which not one token can be sampled."""
        if num_tokens >= self.recorder.engine.max_model_len:
            session.num_overlong += 1
            raise ContextLengthError(self._describe_context(f"the prompt has {num_tokens} tokens"), param=param)

    def _describe_context(self, found: str) -> str:
        length = self.recorder.engine.max_model_len
        return (
            f"this model's maximum context length is {length} tokens and {found}; shorten the messages, "
            "or raise model.max_model_len"
        )

    async def complete(self, key: str, fields: Any) -> dict[str, Any]:
        """The answer to a chat request that is not streamed."""
        answer = await self.admit(self.find_session(key), fields)
        with translate_errors():
            return await create_completion(answer)
