"""The HTTP interface for workers, as an ASGI app.

    GET or POST /tasks/next                     the next task, or 204 after `wait_s` seconds without one
    POST /trajectories/{attempt_id}/reward      {"reward", "metrics", "response"}: the attempt is done
    POST /trajectories/{attempt_id}/failure     {"message"}: the attempt has failed
    POST /trajectories/{attempt_id}/heartbeat   the worker is alive
    /attempts/{attempt_id}/v1/...               the model endpoint, bound to the attempt
    GET /health

Every error is JSON in the form of the OpenAI API, with one sentence. The attempt's id is its API key and cannot be
guessed; `/tasks` and `/trajectories` also ask for the key of the queue, if there is one. On several ranks only the
first hands out tasks; it passes reports for attempts of others on to them (`rank_queue.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, ExceptionHandler, Receive, Scope, Send

from tunesmith.rollout.failures import WorkerError
from tunesmith.rollout.openai_server.app import run_while_connected
from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.openai_server.response import build_error
from tunesmith.rollout.task_server.queue import Attempt, TaskQueue
from tunesmith.rollout.task_server.request import FailureReport, NextTask, RewardReport, check_key, read_fields
from tunesmith.types import WorkflowOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Who may use the queue, and how much."""

    api_key: str | None = None
    max_body_bytes: int
    max_requests: int
    public_url: str | None = None
    """Base URL of tasks, with `{rank}` for the rank's number; None takes the one that the worker used."""


def build_task_app(queue: TaskQueue, model_app: ASGIApp, limits: ServerLimits, *, has_tasks: bool = True) -> ASGIApp:
    """The app of one queue; `model_app` is the model endpoint, with session keys in its paths (`/t/{key}/v1`).

    `has_tasks`: False on ranks other than the first.
    """
    handlers = _Handlers(queue, limits)
    app = Starlette(
        routes=[
            Route("/health", handlers.health, methods=["GET"]),
            *([Route("/tasks/next", handlers.next_task, methods=["GET", "POST"])] if has_tasks else []),
            Route("/trajectories/{attempt_id}/reward", handlers.reward, methods=["POST"]),
            Route("/trajectories/{attempt_id}/failure", handlers.failure, methods=["POST"]),
            Route("/trajectories/{attempt_id}/heartbeat", handlers.heartbeat, methods=["POST"]),
            Mount("/attempts", _ModelRoute(queue, model_app)),
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


class _Handlers:
    def __init__(self, queue: TaskQueue, limits: ServerLimits) -> None:
        self._queue = queue
        self._limits = limits

    async def health(self, request: Request) -> Response:
        """State of the queue; needs no API key."""
        return JSONResponse({"status": "ok", "num_waiting": self._queue.num_waiting, "num_open": self._queue.num_open})

    async def next_task(self, request: Request) -> Response:
        check_key(request.scope, self._limits.api_key)
        asked = await read_fields(request, NextTask, max_bytes=self._limits.max_body_bytes)
        attempt = await run_while_connected(request.receive, self._queue.take(asked.worker, asked.wait_s))
        return Response(status_code=204) if attempt is None else JSONResponse(self._describe(attempt, request))

    def _describe(self, attempt: Attempt, request: Request) -> dict[str, Any]:
        if self._limits.public_url is not None:
            url = self._limits.public_url.replace("{rank}", str(attempt.rank))
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
            "deadline_s": self._queue.timeout_s,
        }

    async def reward(self, request: Request) -> Response:
        attempt_id = self._find_attempt(request)
        report = await read_fields(request, RewardReport, max_bytes=self._limits.max_body_bytes)
        if self._queue.has_judge and report.reward is not None:
            raise ApiError(400, "reward: the judge of the run gives the reward; post the response only")
        if not self._queue.has_judge and report.reward is None:
            raise ApiError(400, "reward: missing, and the run has no judge; post a number, or a failure")
        output = WorkflowOutput(reward=report.reward, response=report.response, metrics=report.metrics)
        await self._queue.report(attempt_id, output)
        return JSONResponse({"status": "accepted"})

    async def failure(self, request: Request) -> Response:
        attempt_id = self._find_attempt(request)
        report = await read_fields(request, FailureReport, max_bytes=self._limits.max_body_bytes)
        await self._queue.report(attempt_id, WorkerError(report.message))
        return JSONResponse({"status": "accepted"})

    async def heartbeat(self, request: Request) -> Response:
        await self._queue.report(self._find_attempt(request), None)
        return JSONResponse({"status": "ok"})

    def _find_attempt(self, request: Request) -> str:
        """The id of an attempt; one of this rank that has ended is refused before the body is read."""
        check_key(request.scope, self._limits.api_key)
        attempt_id = str(request.path_params["attempt_id"])
        if not self._queue.is_elsewhere(attempt_id):
            self._queue.find_open(attempt_id, is_report=True)
        return attempt_id


class _ModelRoute:
    """Passes model calls of open attempts to the endpoint, and refuses those of others."""

    def __init__(self, queue: TaskQueue, model_app: ASGIApp) -> None:
        self._queue = queue
        self._model_app = model_app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        attempt_id, _, rest = scope["path"].removeprefix("/attempts/").partition("/")
        if self._queue.is_elsewhere(attempt_id):
            raise ApiError(404, "the model of this attempt is served at the base_url of its task")
        attempt = self._queue.find_open(attempt_id)
        path = f"/t/{attempt_id}/{rest}"
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": "", "path_params": {}}
        with attempt.call():
            await self._model_app(inner, receive, send)


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
