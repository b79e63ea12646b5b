"""Serves a queue or live traffic, and the model, over HTTP on the running event loop, for a whole run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from tunesmith.cluster.links import NO_LINKS, Links
from tunesmith.http_server import serve_app
from tunesmith.rollout.openai_server.app import EndpointApp
from tunesmith.rollout.service import ModelService
from tunesmith.rollout.task_server.app import ServerLimits, build_live_app, build_task_app
from tunesmith.rollout.task_server.live import LiveSessions
from tunesmith.rollout.task_server.queue import TaskQueue
from tunesmith.rollout.task_server.rank_queue import share_queue

KNOB = "serve.port"


@contextlib.asynccontextmanager
async def serve_tasks(
    queue: TaskQueue,
    service: ModelService,
    limits: ServerLimits,
    *,
    host: str,
    port: int,
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
    public_url = None if limits.public_url is None else limits.public_url.replace("{rank}", str(rank))
    has_key = limits.api_key is not None
    async with (
        serve_app(app, has_key=has_key, host=host, port=port, knob=KNOB, public_url=public_url) as url,
        share_queue(queue, links, url=url),
    ):
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
    rank: int = 0,
    links: Links = NO_LINKS,
) -> AsyncIterator[str]:
    """Serve live traffic until the block ends, and yield the URL; there is one rank."""
    assert rank == 0 and not links.by_rank
    sessions.bind(service)
    app = build_live_app(sessions, EndpointApp(service.endpoint, max_body_bytes=limits.max_body_bytes), limits)
    server = serve_app(
        app, has_key=limits.api_key is not None, host=host, port=port, knob=KNOB, public_url=limits.public_url
    )
    async with server as url, sessions.watch():
        try:
            yield url
        finally:
            sessions.finish()
