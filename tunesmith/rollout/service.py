"""Model providers: they open the model object that a workflow receives, bound to one trajectory.

A `ModelService` serves one engine through the OpenAI-compatible endpoint; its models have a client that reaches the
endpoint in process. The HTTP client is created once and shared, so a trajectory costs only a key and a shallow copy of
the OpenAI client. An `ExternalModel` wraps a model served elsewhere; all trajectories share one object.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tunesmith.chat.renderer import Renderer
from tunesmith.http_server import serve_app
from tunesmith.rollout.chat_model import ChatModel, Endpoint
from tunesmith.rollout.openai_server.app import EndpointApp
from tunesmith.rollout.openai_server.asgi_transport import InProcessClients
from tunesmith.rollout.openai_server.client import InProcessClient
from tunesmith.rollout.openai_server.endpoint import ChatEndpoint
from tunesmith.rollout.recording.recorder import Recorder
from tunesmith.rollout.recording.replay import RolloutRecord
from tunesmith.types import Engine, Sampling, Turn

IN_PROCESS_URL = "http://tunesmith.invalid"
"""Base URL of in-process clients; no server listens there."""

BuildModel = Callable[[Endpoint], Any]


class RecordedCalls(Protocol):
    """What a rollout reads of its session."""

    record: RolloutRecord | None
    """Calls that branches replay; None if rollouts do not branch."""

    @property
    def num_calls(self) -> int: ...

    @property
    def engine_error(self) -> str | None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundModel:
    """A model bound to one trajectory."""

    model: Any
    session: RecordedCalls | None
    """None for external models, whose calls are not recorded."""
    close: Callable[[], tuple[Turn, ...]] = tuple
    """Ends the session and returns its turns."""


class ModelProvider(Protocol):
    """Opens the models of trajectories."""

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel: ...


class ExternalModel:
    """A model served elsewhere, for example at a URL; its calls are neither seeded nor recorded."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        return BoundModel(model=self._model, session=None)


class UnrecordedModel:
    """The model of a service for calls that are not trained: the policy as its own opponent."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    def open(self, *, seed: int, order: tuple[int, ...], sampling: Sampling | None = None) -> BoundModel:
        return self._service.open(seed=seed, order=order, sampling=sampling, is_recorded=False)


class ModelService:
    """The endpoint of one engine, and the models bound to its sessions."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        model_name: str,
        sampling: Sampling,
        build_model: BuildModel = ChatModel,
        is_recorded: bool = True,
        build_endpoint: Callable[..., ChatEndpoint] = ChatEndpoint,
    ) -> None:
        """`sampling`: defaults for parameters that requests leave out; `is_recorded`: False for untrained models;
        `build_endpoint`: the endpoint's class."""
        self.recorder = Recorder(engine, renderer)
        self.endpoint = build_endpoint(self.recorder, model_name=model_name)
        self.base_url = f"{IN_PROCESS_URL}/v1"
        """The server's URL while the endpoint is served over HTTP."""
        self.is_served = False
        """Whether the endpoint is served over HTTP now."""
        self._sampling = sampling
        self._build_model = build_model
        self._is_recorded = is_recorded
        self._clients = InProcessClients(EndpointApp(self.endpoint))
        self._http_client = self._clients.get_async_client()
        self._client = InProcessClient(
            endpoint=self.endpoint,
            base_url=self.base_url,
            api_key="bound to a session",
            http_client=self._http_client,
            max_retries=0,
            timeout=None,
        )

    @property
    def policy_version(self) -> int:
        return self.recorder.engine.policy_version

    def open(
        self,
        *,
        seed: int,
        order: tuple[int, ...] = (),
        sampling: Sampling | None = None,
        is_recorded: bool | None = None,
    ) -> BoundModel:
        """A model bound to a new session; `sampling` and `is_recorded` override the service's own."""
        self._clients.note_loop()
        session = self.recorder.open_session(
            seed=seed,
            order=order,
            sampling=sampling or self._sampling,
            is_recorded=self._is_recorded if is_recorded is None else is_recorded,
        )
        endpoint = Endpoint(
            base_url=self.base_url if self.is_served else None,
            api_key=session.key,
            model_name=self.endpoint.model_name,
            client=self._client.bind(session.key),
            max_model_len=self.recorder.engine.max_model_len,
            http_client=self._http_client,
            in_process=self._clients,
        )
        close = partial(self.recorder.close_session, session.key)
        return BoundModel(model=self._build_model(endpoint), session=session, close=close)

    @contextlib.asynccontextmanager
    async def serve(self, *, port: int = 0, max_body_bytes: int | None = None) -> AsyncIterator[str]:
        """Also serve the endpoint over HTTP; models opened meanwhile have its URL as `base_url`."""
        app = EndpointApp(self.endpoint, max_body_bytes=max_body_bytes)
        async with serve_app(app, has_key=True, port=port) as url:
            self.base_url = self._client.base_url = f"{url}/v1"
            self.is_served = True
            try:
                yield self.base_url
            finally:
                self.base_url = self._client.base_url = f"{IN_PROCESS_URL}/v1"
                self.is_served = False
