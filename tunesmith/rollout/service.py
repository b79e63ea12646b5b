"""Models that workflows get: each bound to one trajectory, all served by one engine.

A `ModelService` puts an engine behind the endpoint and hands out models whose client reaches it in process. The shared
HTTP client is made once; a trajectory costs a key and a copy of the client. A `ExternalModel` is a model that is not
ours: every trajectory gets the same object.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.chat_model import ChatModel, Endpoint
from tunesmith.rollout.openai_server.app import build_app
from tunesmith.rollout.openai_server.asgi_transport import InProcessTransport, SharedClient
from tunesmith.rollout.openai_server.client import InProcessClient
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint
from tunesmith.rollout.openai_server.http import serve_app
from tunesmith.rollout.recorder import Recorder, Session
from tunesmith.types import Engine, Sampling, Turn

IN_PROCESS_URL = "http://tunesmith.invalid"
"""Reached by the shared client only; no server listens there."""

BuildModel = Callable[[Endpoint], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundModel:
    """A model that one trajectory holds."""

    model: Any
    session: Session | None
    """None when calls are not ours to record."""


class ModelProvider(Protocol):
    """Where trajectories get a model from."""

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel: ...

    def close(self, bound: BoundModel) -> tuple[Turn, ...]: ...


class ExternalModel:
    """A model elsewhere, such as one at a URL: nothing is seeded and nothing recorded."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        return BoundModel(model=self._model, session=None)

    def close(self, bound: BoundModel) -> tuple[Turn, ...]:
        return ()


class ModelService:
    """One engine's endpoint and the models bound to it."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        model_name: str,
        sampling: Sampling,
        build_model: BuildModel = ChatModel,
        has_recording: bool = True,
    ) -> None:
        """`sampling` holds what requests leave open; `has_recording` is False for models that are not trained."""
        self.recorder = Recorder(engine, renderer)
        self.endpoint = ChatEndpoint(self.recorder, model_name=model_name)
        self.app = build_app(self.endpoint)
        self.base_url = f"{IN_PROCESS_URL}/v1"
        """Changes to a real URL while the endpoint is served over HTTP."""
        self._is_served = False
        self._sampling = sampling
        self._build_model = build_model
        self._has_recording = has_recording
        self._http_client = SharedClient(transport=InProcessTransport(self.app))
        self._client = InProcessClient(
            endpoint=self.endpoint,
            base_url=self.base_url,
            api_key="bound to a session",
            http_client=self._http_client,
            max_retries=0,
            timeout=None,
        )

    def open(self, *, seed: int, order: tuple[int, ...] = (), sampling: Sampling | None = None) -> BoundModel:
        """A model bound to a new session; `sampling` overrides the service's."""
        session = self.recorder.open_session(
            seed=seed, order=order, sampling=sampling or self._sampling, has_recording=self._has_recording
        )
        endpoint = Endpoint(
            base_url=self.base_url if self._is_served else None,
            api_key=session.key,
            model_name=self.endpoint.model_name,
            client=self._client.bind(session.key),
            http_client=self._http_client,
        )
        return BoundModel(model=self._build_model(endpoint), session=session)

    def close(self, bound: BoundModel) -> tuple[Turn, ...]:
        """End the session and return what it recorded."""
        assert bound.session is not None
        return self.recorder.close_session(bound.session.key)

    @contextlib.asynccontextmanager
    async def serve(
        self, *, host: str = "127.0.0.1", port: int = 0, max_body_bytes: int | None = None
    ) -> AsyncIterator[str]:
        """Serve the endpoint over HTTP as well; models that are opened meanwhile carry its URL."""
        app = build_app(self.endpoint, max_body_bytes=max_body_bytes)
        async with serve_app(app, host=host, port=port) as url:
            self.base_url = self._client.base_url = f"{url}/v1"
            self._is_served = True
            try:
                yield self.base_url
            finally:
                self.base_url = self._client.base_url = f"{IN_PROCESS_URL}/v1"
                self._is_served = False

    async def aclose(self) -> None:
        await self._http_client.shut_down()
