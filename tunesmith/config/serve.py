"""Knobs of the server of `tunesmith serve`."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tunesmith.config.section import Needs, Section


class ServeSection(Section):
    """The HTTP server of `tunesmith serve`, from which workers in other processes take their tasks."""

    mode: Literal["tasks", "online"] = "tasks"
    """tasks: workers take the tasks of the run. online: there are no tasks; the model serves live traffic and is
    trained on conversations that have received feedback."""
    host: str = "127.0.0.1"
    """Address on which the server listens; another one than the loopback address needs `api_key_env`."""
    port: int = Field(default=8765, ge=0, le=65535)
    """Port on which the server listens, 0 for any free port, which is printed. On several ranks workers take tasks from
    it, and the model endpoints of the other ranks count up from it."""
    public_url: str | None = None
    """URL under which workers reach the server, for instance through a proxy; null uses the Host header of their
    requests, which without a key must name this machine. On several ranks it contains `{rank}`, which is replaced by
    the number of a task's rank, from 0."""
    api_key_env: str | None = None
    """Environment variable with the API key that workers must send to take tasks and to report; null asks for none."""
    lost_after_s: Annotated[float, Needs("mode", "tasks")] = Field(default=120.0, gt=0)
    """Seconds without a model call or heartbeat of an attempt after which its worker is lost, and another worker
    receives the task. Raise it if workers run slow tools and send no heartbeats."""
    max_attempts: Annotated[int, Needs("mode", "tasks")] = Field(default=3, ge=1)
    """Attempts of a rollout; if the worker of the last one is lost too, the rollout has failed."""
    feedback_timeout_s: Annotated[float, Needs("mode", "online")] = Field(default=3600.0, gt=0)
    """Seconds after its last model call after which a conversation without feedback is dropped."""
    max_sessions: Annotated[int, Needs("mode", "online")] = Field(default=1024, ge=1)
    """Maximum number of conversations that wait for feedback, and of those that wait for training; beyond it
    the oldest is dropped."""
    max_requests: int = Field(default=1024, ge=1)
    """Maximum number of HTTP requests at once, waiting workers included; more get status 503."""

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        if self.api_key_env is None and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} lets other machines take tasks and post rewards: name a key with api_key_env, or "
                "use 127.0.0.1"
            )
        return self


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
