"""Models whose chat completions are recorded as messages: the run's own model, or a teacher at a URL.

A rollout's client talks to an ASGI app in this process (over HTTP with `rollout.http_port`). The app forwards each
request to the model, with the key of the rollout's session or of the teacher, and keeps request and reply. Streams are
forwarded as plain requests and answered in one chunk. What is not a chat completion cannot become a row and is refused.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import openai
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunesmith.http_server import read_key, serve_app
from tunesmith.rollout.chat_model import Endpoint
from tunesmith.rollout.openai_server.asgi_transport import InProcessClients
from tunesmith.rollout.service import IN_PROCESS_URL, BoundModel, ModelProvider
from tunesmith.rollout.task_server.app import answer_error
from tunesmith.runs.policy import BuildModel
from tunesmith.types import Sampling, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One reply of the model, and the request that it answers."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    reply: dict[str, Any]
    is_cut: bool
    """Whether the reply ended at a limit of tokens."""


class RecordingModel:
    """A `ModelProvider` that records the conversations of its rollouts with the chat models of another one."""

    def __init__(self, model: ModelProvider, *, build_model: BuildModel) -> None:
        self._model, self._build_model = model, build_model
        self._open: dict[str, tuple[BoundModel, list[RecordedCall]]] = {}
        """The models that are forwarded to, and the calls so far, by key."""
        self._ended: dict[tuple[int, ...], list[RecordedCall]] = {}
        self._url: str | None = None
        self._app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/{path:path}", _refuse, methods=["GET", "POST"]),
            ]
        )
        self._clients = InProcessClients(self._app)
        self._http_client = self._clients.get_async_client()

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        self._clients.note_loop()
        source, key = self._model.open(seed=seed, order=order, sampling=sampling), secrets.token_urlsafe(16)
        url, known = self._url or f"{IN_PROCESS_URL}/v1", source.model.endpoint
        endpoint = Endpoint(
            base_url=self._url,
            api_key=key,
            model_name=known.model_name,
            client=openai.AsyncOpenAI(
                base_url=url, api_key=key, http_client=self._http_client, max_retries=0, timeout=None
            ),
            max_model_len=known.max_model_len,
            http_client=self._http_client,
            in_process=self._clients,
        )
        calls = list[RecordedCall]()

        def close() -> tuple[Turn, ...]:
            del self._open[key]
            self._ended[order] = calls
            return source.close()

        self._open[key] = source, calls
        return BoundModel(model=self._build_model(endpoint, {}), session=source.session, close=close)

    def take(self, order: tuple[int, ...]) -> list[RecordedCall]:
        """The calls of a rollout that has ended, in the order of their replies."""
        return self._ended.pop(order)

    @contextlib.asynccontextmanager
    async def serve(self, port: int | None) -> AsyncIterator[None]:
        """Also answer over HTTP; None: in process only."""
        if port is None:
            yield
            return
        async with serve_app(self._app, has_key=True, port=port) as url:
            self._url = f"{url}/v1"
            yield

    async def _answer(self, request: Request) -> Response:
        """Forward a chat completion, and record each of its choices."""
        opened = self._open.get(read_key(request.scope) or "")
        if opened is None:
            return answer_error(401, "the API key belongs to no open rollout")
        source, calls = opened
        body = json.loads(await request.body())
        is_stream, with_usage = body.pop("stream", False), body.pop("stream_options", None) is not None
        model = source.model
        sent = {**model.options.get("extra_body", {}), **model.options, **body, "model": model.model_name}
        sent.pop("extra_body", None)
        try:
            completion: Any = await model.client.post("/chat/completions", body=sent, cast_to=object)
        except openai.APIStatusError as error:
            detail = error.body if isinstance(error.body, dict) else {"message": str(error)}
            return JSONResponse({"error": detail}, error.status_code)
        except openai.APIConnectionError as error:
            return answer_error(
                502, f"the model at {model.client.base_url} does not answer: {error.__cause__ or error}"
            )
        for choice in completion["choices"]:
            call = RecordedCall(
                messages=body["messages"],
                tools=body.get("tools") or [],
                reply=_clean_reply(choice["message"]),
                is_cut=choice["finish_reason"] == "length",
            )
            calls.append(call)
        if not is_stream:
            return JSONResponse(completion)
        return Response(_write_stream(completion, with_usage=with_usage), media_type="text/event-stream")


async def _refuse(request: Request) -> Response:
    return answer_error(404, f"{request.url.path} cannot be recorded as messages: use chat completions in the workflow")


def _clean_reply(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a reply that fine-tuning renders."""
    reply = {"role": "assistant", "content": message.get("content")}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        reply["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        reply["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": call["function"]} for call in message["tool_calls"]
        ]
    return reply


def _write_stream(completion: Mapping[str, Any], *, with_usage: bool) -> str:
    """A completion as the events of a stream: one with the whole replies, one with their ends."""
    head = {key: completion.get(key) for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    starts, ends = [], []
    for choice in completion["choices"]:
        message = {key: value for key, value in choice["message"].items() if value is not None}
        calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", None) or [])]
        delta = message | ({"tool_calls": calls} if calls else {})
        starts.append({"index": choice["index"], "delta": delta, "finish_reason": None})
        ends.append({"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]})
    chunks = [head | {"choices": starts}, head | {"choices": ends}]
    if with_usage:
        chunks.append(head | {"choices": [], "usage": completion.get("usage")})
    return "".join(f"data: {text}\n\n" for text in [*map(json.dumps, chunks), "[DONE]"])
