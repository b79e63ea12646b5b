"""The HTTP interfaces of a served run, for workers that take tasks and for live traffic: ASGI apps, served for the run.

Workers:

    GET or POST /tasks/next                     the next task, or 204 after `wait_s` seconds without one
    POST /trajectories/{attempt_id}/reward      {"reward", "metrics", "response"}: the attempt is done
    POST /trajectories/{attempt_id}/failure     {"message"}: the attempt has failed
    POST /trajectories/{attempt_id}/heartbeat   the worker is alive
    /attempts/{attempt_id}/v1/...               the model endpoint, bound to the attempt
    GET /health

Every error is JSON in the form of the OpenAI API, with one sentence. The attempt's id is its API key and cannot be
guessed; `/tasks` and `/trajectories` also ask for the key of the queue, if there is one. On several ranks only the
first hands out tasks; it passes reports for attempts of others on to them (`rank_queue.py`).

Live traffic, where every request but that for health asks for the key of the server, if there is one:

    /v1/...  with the header X-Session-Id       the model endpoint; the header names the conversation
    /sessions/{session_id}/v1/...               the same, for clients that cannot send the header
    POST /sessions/{session_id}/reward          {"reward", "metrics", "response"}: feedback
    GET /health
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import URL, Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from tunesmith.cluster.links import NO_LINKS, Links
from tunesmith.http_server import has_key, serve_app
from tunesmith.rollout.failures import WorkerError
from tunesmith.rollout.openai_server.app import EndpointApp, parse_json, read_limited_body, run_while_connected
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.openai_server.response import build_error
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.task_server.live import LiveSessions
from tunesmith.rollout.task_server.queue import Attempt, TaskQueue
from tunesmith.rollout.task_server.rank_queue import share_queue
from tunesmith.types import MAX_METRIC, MAX_REWARD, WorkflowOutput

SESSION_HEADER = "x-session-id"
MAX_WAIT_S = 60.0
MAX_NAME_CHARS = 200

Body = TypeVar("Body", bound=BaseModel)
Metric = Annotated[float, Field(ge=-MAX_METRIC, le=MAX_METRIC, allow_inf_nan=False)]


class NextTask(BaseModel):
    """Fields or query parameters of `/tasks/next`."""

    model_config = ConfigDict(extra="forbid")
    worker: str = Field(default="", max_length=MAX_NAME_CHARS)
    wait_s: float = Field(default=30.0, ge=0, le=MAX_WAIT_S, allow_inf_nan=False)


class RewardReport(BaseModel):
    """Fields of the reward of an attempt, and of the feedback on a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)
    reward: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)] | None = None
    metrics: dict[str, Metric] = Field(default_factory=dict)
    response: Any = None
    """What the judge receives; any JSON value."""

    def to_output(self) -> WorkflowOutput:
        return WorkflowOutput(reward=self.reward, response=self.response, metrics=self.metrics)


class FailureReport(BaseModel):
    """Fields of `/trajectories/{attempt_id}/failure`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    message: str = Field(min_length=1)


async def read_fields(request: Request, kind: type[Body], *, max_bytes: int) -> Body:
    """The fields of a request: its JSON body, or the query of a request without one."""
    body = await read_limited_body(request.scope, request.receive, max_bytes)
    fields = parse_json(body) if body else dict(request.query_params)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ApiError(400, "; ".join(map(_describe, error.errors()))) from error


def _describe(error: Any) -> str:
    """One clause for an invalid field."""
    where = ".".join(map(str, error["loc"])) or "the request"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"


def check_key(scope: Scope, api_key: str | None) -> None:
    """Raise ApiError unless the request has the key; None asks for no key."""
    if not has_key(scope, api_key):
        raise ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Where a server listens, who may use it, and how much."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free one."""
    api_key: str | None = None
    max_body_bytes: int
    max_requests: int
    public_url: str | None = None
    """Base URL of tasks, with `{rank}` for the rank's number; None takes the one that the worker used."""


def build_task_app(queue: TaskQueue, model_app: ASGIApp, limits: ServerLimits, *, has_tasks: bool = True) -> ASGIApp:
    """The app of one queue; `model_app` is the model endpoint, with session keys in its paths (`/t/{key}/v1`).

    `has_tasks`: False on ranks other than the first.
    """

    async def health(request: Request) -> Response:
        """State of the queue; needs no API key."""
        return JSONResponse({"status": "ok", "num_waiting": queue.num_waiting, "num_open": queue.num_open})

    async def next_task(request: Request) -> Response:
        check_key(request.scope, limits.api_key)
        asked = await read_fields(request, NextTask, max_bytes=limits.max_body_bytes)
        attempt = await run_while_connected(request.receive, queue.take(asked.worker, asked.wait_s))
        return Response(status_code=204) if attempt is None else JSONResponse(describe(attempt, request))

    def describe(attempt: Attempt, request: Request) -> dict[str, Any]:
        if limits.public_url is not None:
            url = limits.public_url.replace("{rank}", str(attempt.rank))
        elif attempt.url is None:
            url = str(request.base_url)
        else:
            url = str(request.base_url.replace(port=URL(attempt.url).port))
        url = url.rstrip("/")
        return {
            "attempt_id": attempt.attempt_id,
            "task": attempt.task,
            "base_url": f"{url}/attempts/{attempt.attempt_id}/v1",
            "api_key": attempt.attempt_id,
            "model": attempt.model_name,
            "deadline_s": queue.timeout_s,
        }

    async def reward(request: Request) -> Response:
        attempt_id = find_attempt(request)
        report = await read_fields(request, RewardReport, max_bytes=limits.max_body_bytes)
        if queue.has_judge and report.reward is not None:
            raise ApiError(400, "reward: the judge of the run gives the reward; post the response only")
        if not queue.has_judge and report.reward is None:
            raise ApiError(400, "reward: missing, and the run has no judge; post a number, or a failure")
        await queue.report(attempt_id, report.to_output())
        return JSONResponse({"status": "accepted"})

    async def failure(request: Request) -> Response:
        attempt_id = find_attempt(request)
        report = await read_fields(request, FailureReport, max_bytes=limits.max_body_bytes)
        await queue.report(attempt_id, WorkerError(report.message))
        return JSONResponse({"status": "accepted"})

    async def heartbeat(request: Request) -> Response:
        await queue.report(find_attempt(request), None)
        return JSONResponse({"status": "ok"})

    def find_attempt(request: Request) -> str:
        """The id of an attempt; one of this rank that has ended is refused before the body is read."""
        check_key(request.scope, limits.api_key)
        attempt_id = str(request.path_params["attempt_id"])
        if not queue.is_elsewhere(attempt_id):
            queue.find_open(attempt_id, is_report=True)
        return attempt_id

    async def call_model(scope: Scope, receive: Receive, send: Send) -> None:
        """Pass model calls of open attempts to the endpoint, and refuse those of others."""
        attempt_id, _, rest = scope["path"].removeprefix("/attempts/").partition("/")
        if queue.is_elsewhere(attempt_id):
            raise ApiError(404, "the model of this attempt is served at the base_url of its task")
        with queue.find_open(attempt_id).call():
            await model_app(move_request(scope, f"/t/{attempt_id}/{rest}"), receive, send)

    app = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            *([Route("/tasks/next", next_task, methods=["GET", "POST"])] if has_tasks else []),
            Route("/trajectories/{attempt_id}/reward", reward, methods=["POST"]),
            Route("/trajectories/{attempt_id}/failure", failure, methods=["POST"]),
            Route("/trajectories/{attempt_id}/heartbeat", heartbeat, methods=["POST"]),
            Mount("/attempts", call_model),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    return RequestLimit(app, limits.max_requests)


async def answer_exception(request: Request, error: Exception) -> Response:
    """A refusal, or 500 for an error of ours, whose traceback is logged by the server.

    A coroutine: Starlette runs plain functions in a thread, and logs a traceback if the server ends meanwhile.
    """
    match error:
        case ApiError():
            return answer_error(error.status, str(error))
        case HTTPException():  # no such route, or another method
            path = re.sub(r"^/t/[^/]*", "", request.url.path)  # without the key of a session
            return answer_error(error.status_code, f"{request.method} {path}: {error.detail.lower()}")
        case ClientDisconnect():
            return Response(status_code=400)
    return answer_error(500, f"the server failed: {type(error).__name__}: {error}")


def answer_error(status: int, message: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse(build_error(message, status=status), status_code=status, headers=headers)


EXCEPTION_HANDLERS: Mapping[Any, ExceptionHandler] = dict.fromkeys(
    (ApiError, HTTPException, ClientDisconnect, Exception), answer_exception
)


def build_live_app(sessions: LiveSessions, model_app: ASGIApp, limits: ServerLimits) -> ASGIApp:
    """The app of one run; `model_app` is the model endpoint, with session keys in its paths (`/t/{key}/v1`)."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "num_open": sessions.num_open, "num_scored": sessions.num_scored})

    async def reward(request: Request) -> Response:
        check_key(request.scope, limits.api_key)
        session_id = str(request.path_params["session_id"])
        sessions.check_open(session_id)
        report = await read_fields(request, RewardReport, max_bytes=limits.max_body_bytes)
        if report.reward is None:
            raise ApiError(400, "reward: missing; post a number")
        sessions.add_feedback(session_id, report.to_output())
        return JSONResponse({"status": "accepted"})

    async def call_model(scope: Scope, receive: Receive, send: Send) -> None:
        """Pass model calls to the endpoint, each in the session that its path or its header names."""
        check_key(scope, limits.api_key)
        rest = scope["path"].split("/v1/", 1)[-1]
        if scope["method"] != "POST":
            await model_app(move_request(scope, f"/v1/{rest}"), receive, send)
            return
        session_id = scope["path_params"].get("session_id") or Headers(scope=scope).get(SESSION_HEADER, "").strip()
        if not 0 < len(session_id) <= MAX_NAME_CHARS:
            advice = f"send the header X-Session-Id (1 to {MAX_NAME_CHARS} characters), or use /sessions/ID/v1"
            raise ApiError(400, f"the request names no conversation: {advice}")
        live = sessions.find_or_open(session_id)
        with live.call():
            await model_app(move_request(scope, f"/t/{live.session.key}/v1/{rest}"), receive, send)

    routes = [
        Route("/health", health, methods=["GET"]),
        Route("/sessions/{session_id}/reward", reward, methods=["POST"]),
        Mount("/sessions/{session_id}/v1", call_model),
        Mount("/v1", call_model),
    ]
    return RequestLimit(Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS), limits.max_requests)


def move_request(scope: Scope, path: str) -> Scope:
    """The request at a path of the model endpoint."""
    return {**scope, "path": path, "raw_path": path.encode(), "root_path": "", "path_params": {}}


class RequestLimit:
    """Answers 503 while too many requests are open."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_open >= self._max_requests:
            message = f"more than serve.max_requests={self._max_requests} requests are open; try again later"
            await answer_error(503, message)(scope, receive, send)
            return
        self._num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1


KNOB = "serve.port"


def listen(app: ASGIApp, limits: ServerLimits, *, rank: int = 0) -> contextlib.AbstractAsyncContextManager[str]:
    public_url = None if limits.public_url is None else limits.public_url.replace("{rank}", str(rank))
    has_key = limits.api_key is not None
    return serve_app(app, has_key=has_key, host=limits.host, port=limits.port, knob=KNOB, public_url=public_url)


@contextlib.asynccontextmanager
async def serve_tasks(
    queue: TaskQueue,
    service: ModelService,
    limits: ServerLimits,
    *,
    rank: int = 0,
    links: Links = NO_LINKS,
    end_grace_s: float = 0.0,
) -> AsyncIterator[str]:
    """Serve until the block ends, and yield the URL; waiting workers then learn that the run has ended.

    So do the others, if they ask for a task within `end_grace_s` seconds. Each rank calls this with links of its own
    between the first one and the others. Workers take the tasks of all ranks from the first one.
    """
    model_app = EndpointApp(service.endpoint, max_body_bytes=limits.max_body_bytes)
    app = build_task_app(queue, model_app, limits, has_tasks=rank == 0)
    async with listen(app, limits, rank=rank) as url, share_queue(queue, links, url=url):
        try:
            yield url
        finally:
            queue.finish()
        await queue.wait_for_workers(end_grace_s)


@contextlib.asynccontextmanager
async def serve_live(
    sessions: LiveSessions, service: ModelService, limits: ServerLimits, *, rank: int = 0, links: Links = NO_LINKS
) -> AsyncIterator[str]:
    """Serve live traffic until the block ends, and yield the URL; there is one rank."""
    assert rank == 0 and not links
    sessions.service = service
    app = build_live_app(sessions, EndpointApp(service.endpoint, max_body_bytes=limits.max_body_bytes), limits)
    async with listen(app, limits) as url, sessions.watch():
        try:
            yield url
        finally:
            sessions.finish()
