"""Chat and text completions, independent of the transport: request fields in, response body out.

The HTTP app and the in-process client are thin layers over `ChatEndpoint`. A request is fulfilled as specified or
refused with a reason. Every error that a client can receive is an `ApiError` with its HTTP status.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tunesmith.chat.client import CONTEXT_LENGTH_EXCEEDED
from tunesmith.chat.renderer import Prompt, PromptTooLongError
from tunesmith.errors import EngineError, ReplayError
from tunesmith.rollout.openai_server.completion import (
    OpenEvents,
    PendingChatCompletion,
    PendingTextCompletion,
    create_completion,
)
from tunesmith.rollout.openai_server.constraints import constrain_call, constrain_reply
from tunesmith.rollout.openai_server.fields import ApiError, RequestError
from tunesmith.rollout.openai_server.request import ChatRequest, RequestParser, TextRequest, parse_text_request
from tunesmith.rollout.recording.recorder import (
    Recorder,
    SamplingRefusedError,
    Session,
    SessionCall,
    SessionClosedError,
)
from tunesmith.types import Sampling

AnyRequest = TypeVar("AnyRequest", ChatRequest, TextRequest)
Admitted = TypeVar("Admitted")

NO_KEY_MESSAGE = "no API key: use the key of the trajectory as the API key, or /t/<key>/v1 as the base URL"
INVALID_KEY_MESSAGE = "the API key belongs to no open trajectory: it is wrong, or the trajectory has ended"


class ErrorTranslation:
    """Converts errors of sessions and engines to `ApiError`; a generator would take longer, and a call enters two."""

    def __init__(self, session: Session | None = None) -> None:
        """`session`: of the request that is being admitted."""
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._session is not None and isinstance(error, RequestError):
            self._session.refuse()
        if isinstance(error, SamplingRefusedError | ReplayError):
            raise ApiError(400, str(error)) from error
        if isinstance(error, SessionClosedError):
            raise ApiError(401, INVALID_KEY_MESSAGE) from error
        if isinstance(error, EngineError):
            raise ApiError(500, f"the engine failed: {error}") from error


class ChatEndpoint:
    """Chat and text completions for the sessions of one engine."""

    def __init__(self, recorder: Recorder, *, model_name: str) -> None:
        self.recorder = recorder
        self.model_name = model_name
        self._parser = RequestParser(recorder.renderer.uses_variable)

    def find_session(self, key: str | None) -> Session:
        session = None if key is None else self.recorder.find_session(key)
        if session is None:
            raise ApiError(401, NO_KEY_MESSAGE if key is None else INVALID_KEY_MESSAGE)
        return session

    def describe_model(self, name: str | None = None) -> dict[str, Any]:
        """The model object of /v1/models; a `name` other than the served model's is a 404."""
        self._check_model(name)
        card = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "tunesmith"}
        return card | {"max_model_len": self.recorder.engine.max_model_len}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.model_name):
            message = f"model {name!r} does not exist; this endpoint serves {self.model_name!r}"
            raise RequestError(message, param="model", status=404)

    async def admit(
        self, session: Session, fields: Any, *, open_events: OpenEvents | None = None
    ) -> PendingChatCompletion:
        """Validate and admit a chat request; raises `ApiError` if it cannot be fulfilled. `open_events`: of an API
        whose responses have another form."""
        renderer = self.recorder.renderer
        with ErrorTranslation(session):
            request, prompt = self._parse_request(session, fields)
            self._check_model(request.model)
            if request.tool_choice == "required" and not renderer.has_tool_calls:
                raise RequestError("tool_choice needs a tool call parser; the run has none", param="tool_choice")
            call = await self._admit(session.admit(prompt), session, param="messages")
            request = self._resolve_ids(request, self._build_chat_grammar(request, call))
            pending = PendingChatCompletion(
                session, renderer, request, call, model_name=self.model_name, open_events=open_events
            )
            self._check_context(session, len(pending.prompt_ids), param="messages")
        return pending

    def _parse_request(self, session: Session, fields: Any) -> tuple[ChatRequest, Prompt]:
        return self._parser.parse(fields, session.sampling, parse_messages=session.conversations.parse)

    async def count_prompt_tokens(self, session: Session, fields: Any) -> int:
        """Number of prompt tokens of a chat request in this session; nothing is sampled or recorded."""
        with ErrorTranslation():
            request, prompt = self._parse_request(session, fields)
            self._check_model(request.model)
            return len(await self._admit(session.build_prompt_ids(prompt), param="messages"))

    async def admit_text(self, session: Session, fields: Any) -> PendingTextCompletion:
        """As `admit`, for a completion request with prompts as text or token ids."""
        with ErrorTranslation(session):
            request = parse_text_request(fields, session.sampling)
            self._check_model(request.model)
            calls = []
            for text in request.prompts:
                admission = session.admit_text(text, adds_special_tokens=request.adds_special_tokens)
                calls.append(await self._admit(admission, session, param="prompt"))
            for call in calls:
                self._check_context(session, len(call.prompt_ids), param="prompt")
            grammar = "" if request.constraint is None else request.constraint.to_grammar()
            request = self._resolve_ids(request, grammar)
        return PendingTextCompletion(session, self.recorder.renderer, request, calls, model_name=self.model_name)

    def _build_chat_grammar(self, request: ChatRequest, call: SessionCall) -> str:
        """The grammar of a reply, after the prefix of a forced tool call; empty if nothing constrains it."""
        if request.tool_choice != "required" and request.constraint is None:
            return ""
        renderer = self.recorder.renderer
        is_callable = request.has_callable_tools and renderer.has_tool_calls
        tools = [
            tool | {"function": tool["function"] | {"strict": tool["function"]["name"] in request.strict_tools}}
            for tool in map(dict, request.tools if is_callable else ())
        ]
        if request.constraint is None:
            return constrain_call(tools, renderer, name=request.called_tool, is_single_call=request.is_single_call)
        return constrain_reply(
            request.constraint, renderer, call.prompt_ids, tools, is_single_call=request.is_single_call
        )

    def _resolve_ids(self, request: AnyRequest, grammar: str) -> AnyRequest:
        """The request with the grammar in its distribution, and the token ids that its bans refer to."""
        sampling: Sampling = request.sampling
        distribution = sampling.distribution
        if not (grammar or request.bad_words or distribution.min_tokens):
            return request
        eos_ids = frozenset() if sampling.ignore_eos else frozenset(self.recorder.engine.eos_ids)
        end_ids = eos_ids.union(sampling.stop_token_ids) if distribution.min_tokens else ()
        texts = [text for word in request.bad_words for text in (word, f" {word}")]
        encode = partial(self.recorder.renderer.encode_prompt, adds_special_tokens=False)
        try:
            words = tuple(dict.fromkeys(map(encode, texts)))
        except ValueError as error:
            raise RequestError(str(error), param="bad_words") from error
        distribution = replace(distribution, end_ids=tuple(sorted(end_ids)), bad_words=words, grammar=grammar)
        return replace(request, sampling=replace(sampling, distribution=distribution))

    async def _admit(
        self, admission: Coroutine[Any, Any, Admitted], session: Session | None = None, *, param: str
    ) -> Admitted:
        """Await the admission of a prompt and convert its errors; `session` counts one that is too long."""
        try:
            return await admission
        except PromptTooLongError as error:
            if session is not None:
                session.num_overlong += 1
            raise self._build_context_error(str(error), param) from error
        except ValueError as error:
            raise RequestError(str(error), param=param) from error

    def _check_context(self, session: Session, num_tokens: int, *, param: str) -> None:
        """Refuse a prompt that leaves no room for a sampled token."""
        if num_tokens >= self.recorder.engine.max_model_len:
            session.num_overlong += 1
            raise self._build_context_error(f"the prompt has {num_tokens} tokens", param)

    def _build_context_error(self, found: str, param: str) -> RequestError:
        message = (
            f"this model's maximum context length is {self.recorder.engine.max_model_len} tokens and {found}; shorten "
            "the messages, or raise model.max_model_len, or the KV cache if that is smaller"
        )
        return RequestError(message, param=param, code=CONTEXT_LENGTH_EXCEEDED)

    async def complete(self, key: str, fields: Any) -> dict[str, Any]:
        """Response body of a non-streaming chat request."""
        pending = await self.admit(self.find_session(key), fields)
        with ErrorTranslation():
            return await create_completion(pending)
