"""The server of a run whose workflows are programs outside of it, on every rank from the first step to the last."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from tunesmith.cluster.links import Links
from tunesmith.rollout.actors import Actors
from tunesmith.rollout.service import ModelProvider, ModelService

T = TypeVar("T")


class StartServer(Protocol):
    """Serves the policy of a rank and yields the URL."""

    def __call__(self, service: ModelService, *, rank: int, links: Links) -> AbstractAsyncContextManager[str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Lets programs outside of this process take the place of the workflow."""

    start: StartServer
    model: ModelProvider | None = None
    """What binds models to rollouts, if it is not the service."""
    notice: str
    """The console line, with `{url}` in place of the URL."""


def bind_actors(actors: Actors, server: Server | None) -> Actors:
    """The actors with the server's models, if there is a server."""
    return actors if server is None or server.model is None else replace(actors, model=server.model)


async def work_while_serving(
    work: Callable[[], Awaitable[T]],
    server: Server | None,
    service: ModelService,
    links: Links,
    *,
    rank: int = 0,
    show_line: Callable[[str], None] | None = None,
) -> T:
    """Do the work while the server runs, if there is one, with links of its own; `show_line` gets its notice."""
    if server is None:
        return await work()
    async with server.start(service, rank=rank, links=links) as url:
        if show_line is not None:
            show_line(server.notice.format(url=url))
        return await work()
