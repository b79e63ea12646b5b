"""Actors: the loaded models together with the user's functions, which a worker runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from tunesmith.rollout.branching.tree import Branching
from tunesmith.rollout.runner import Agent
from tunesmith.rollout.service import ModelProvider, ModelService
from tunesmith.types import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """The loaded models together with the workflow and the judge."""

    engine: Engine | None
    """The sampler of the policy; None if the model is outside of this process."""
    model: ModelProvider
    """Binds models to the policy's rollouts."""
    service: ModelService | None = None
    """Serves the policy to workflows; its counters are those of the rollouts."""
    auxiliary_models: Mapping[str, ModelProvider] = field(default_factory=dict)
    auxiliary_engines: Sequence[Engine] = ()
    """The engines of local auxiliary models, whose weights never change."""
    agent: Agent
    max_concurrency: int
    """Rollouts that run at a time."""
    branching: Branching | None = None
    """How rollouts of a group that is trained branch; None: all of them start from the task."""
    http_port: int | None = None
    """Port of the policy's HTTP server while workflows run; auxiliary models use free ports. None: in process only."""
    max_body_bytes: int = 8 * 2**20
    """Size limit of an HTTP request body."""


@asynccontextmanager
async def serve_models(actors: Actors) -> AsyncIterator[None]:
    """Serve the models over HTTP, if the run does and they are not served already."""
    async with AsyncExitStack() as serving:
        if actors.http_port is not None and actors.service is not None and not actors.service.is_served:
            local_services = [each for each in actors.auxiliary_models.values() if isinstance(each, ModelService)]
            ports = {actors.service: actors.http_port} | dict.fromkeys(local_services, 0)
            for service, port in ports.items():
                served = service.serve(port=port, max_body_bytes=actors.max_body_bytes)
                await serving.enter_async_context(served)
        yield
