"""Serves a queue or live traffic, and the model, over HTTP on the running event loop, for a whole run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from tunesmith.rollout.openai_server.app import build_app
from tunesmith.rollout.openai_server.http import serve_app
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.task_server.app import ServerLimits, answer_unknown, build_task_app
from tunesmith.rollout.task_server.live import LiveSessions
from tunesmith.rollout.task_server.live_app import build_live_app
from tunesmith.rollout.task_server.queue import TaskQueue

KNOB = "serve.port"


@contextlib.asynccontextmanager
async def serve_tasks(
    queue: TaskQueue, service: ModelService, limits: ServerLimits, *, host: str, port: int
) -> AsyncIterator[str]:
    """Serve until the block ends, and yield the URL; waiting workers then learn that the run has ended."""
    app = build_task_app(queue, build_model_app(service, limits), limits)
    async with serve_app(app, host=host, port=port, knob=KNOB) as url:
        try:
            yield url
        finally:
            queue.finish()


@contextlib.asynccontextmanager
async def serve_live(
    sessions: LiveSessions, service: ModelService, limits: ServerLimits, *, host: str, port: int
) -> AsyncIterator[str]:
    """Serve live traffic until the block ends, and yield the URL."""
    sessions.bind(service)
    app = build_live_app(sessions, build_model_app(service, limits), limits)
    async with serve_app(app, host=host, port=port, knob=KNOB) as url, sessions.watch():
        try:
            yield url
        finally:
            sessions.finish()


def build_model_app(service: ModelService, limits: ServerLimits) -> ASGIApp:
    """The model endpoint; unknown routes are JSON errors too."""
    app = build_app(service.endpoint, max_body_bytes=limits.max_body_bytes)
    app.add_exception_handler(HTTPException, answer_unknown)
    return app
