"""Serves a queue and the model over HTTP on the running event loop, for a whole run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.exceptions import HTTPException

from tunesmith.rollout.openai_server.app import build_app
from tunesmith.rollout.openai_server.http import serve_app
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.task_server.app import ServerLimits, answer_unknown, build_task_app
from tunesmith.rollout.task_server.queue import TaskQueue


@contextlib.asynccontextmanager
async def serve_tasks(
    queue: TaskQueue, service: ModelService, limits: ServerLimits, *, host: str, port: int
) -> AsyncIterator[str]:
    """Serve until the block ends, and yield the URL; waiting workers then learn that the run has ended."""
    model_app = build_app(service.endpoint, max_body_bytes=limits.max_body_bytes)
    model_app.add_exception_handler(HTTPException, answer_unknown)
    async with serve_app(build_task_app(queue, model_app, limits), host=host, port=port, knob="serve.port") as url:
        try:
            yield url
        finally:
            queue.finish()
