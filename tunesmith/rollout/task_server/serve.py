"""Serves a queue or live traffic, and the model, over HTTP on the running event loop, for a whole run."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator

import httpx
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from tunesmith.cluster.ranks import Ranks
from tunesmith.http_server import serve_app
from tunesmith.rollout.openai_server.app import build_app
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.task_server.app import ServerLimits, answer_unknown, build_task_app
from tunesmith.rollout.task_server.live import LiveSessions
from tunesmith.rollout.task_server.live_app import build_live_app
from tunesmith.rollout.task_server.queue import TaskQueue
from tunesmith.rollout.task_server.rank_offers import RankRoutes, RemoteQueue

KNOB = "serve.port"


@contextlib.asynccontextmanager
async def serve_tasks(
    queue: TaskQueue,
    service: ModelService,
    limits: ServerLimits,
    *,
    host: str,
    port: int,
    ranks: Ranks = Ranks(),
    end_grace_s: float = 0.0,
) -> AsyncIterator[str]:
    """Serve until the block ends, and yield the URL; waiting workers then learn that the run has ended.

    So do the others, if they ask for a task within `end_grace_s` seconds. Each rank calls this. Workers take the tasks
    of all ranks from the first one.
    """
    # no time limit: a rank answers after its update; no proxy of the environment: ranks are on one host
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(), trust_env=False) as client:
        is_leading = ranks.is_first and not ranks.is_alone
        routes = RankRoutes(key=secrets.token_urlsafe(), client=client) if is_leading else None
        model_app = build_model_app(service, limits)
        app = build_task_app(queue, model_app, limits, routes=routes, has_tasks=ranks.is_first)
        public_url = None if limits.public_url is None else limits.public_url.replace("{rank}", str(ranks.rank))
        has_key = limits.api_key is not None
        async with serve_app(app, has_key=has_key, host=host, port=port, knob=KNOB, public_url=public_url) as url:
            first = ranks.broadcast_object(None if routes is None else (url, routes.key))
            if not ranks.is_first:
                client.base_url, client.headers["authorization"] = httpx.URL(first[0]), f"Bearer {first[1]}"
                queue.first_rank = RemoteQueue(client=client, rank=ranks.rank, url=url)
            try:
                yield url
            finally:
                queue.finish()
            await queue.wait_for_workers(end_grace_s)


@contextlib.asynccontextmanager
async def serve_live(
    sessions: LiveSessions,
    service: ModelService,
    limits: ServerLimits,
    *,
    host: str,
    port: int,
    ranks: Ranks = Ranks(),
) -> AsyncIterator[str]:
    """Serve live traffic until the block ends, and yield the URL; there is one rank."""
    assert ranks.is_alone
    sessions.bind(service)
    app = build_live_app(sessions, build_model_app(service, limits), limits)
    server = serve_app(
        app, has_key=limits.api_key is not None, host=host, port=port, knob=KNOB, public_url=limits.public_url
    )
    async with server as url, sessions.watch():
        try:
            yield url
        finally:
            sessions.finish()


def build_model_app(service: ModelService, limits: ServerLimits) -> ASGIApp:
    """The model endpoint; unknown routes are JSON errors too."""
    app = build_app(service.endpoint, max_body_bytes=limits.max_body_bytes)
    app.add_exception_handler(HTTPException, answer_unknown)
    return app
