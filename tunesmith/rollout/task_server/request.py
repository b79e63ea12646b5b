"""Requests of workers: their JSON bodies, checked before they reach the queue."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.types import Scope

from tunesmith import http_server
from tunesmith.rollout.task_server.queue import QueueError
from tunesmith.types import MAX_METRIC, MAX_REWARD

MAX_WAIT_S = 60.0
MAX_NAME_CHARS = 200

Body = TypeVar("Body", bound=BaseModel)
Metric = Annotated[float, Field(ge=-MAX_METRIC, le=MAX_METRIC, allow_inf_nan=False)]


class NextTask(BaseModel):
    """Fields or query parameters of `/tasks/next`."""

    model_config = ConfigDict(extra="forbid")
    worker: str = Field(default="", max_length=MAX_NAME_CHARS)
    wait_s: float = Field(default=30.0, ge=0, le=MAX_WAIT_S, allow_inf_nan=False)


class RewardReport(BaseModel):
    """Fields of `/trajectories/{attempt_id}/reward`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    reward: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)] | None = None
    metrics: dict[str, Metric] = Field(default_factory=dict)
    response: Any = None
    """What the judge receives; any JSON value."""


class FailureReport(BaseModel):
    """Fields of `/trajectories/{attempt_id}/failure`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    message: str = Field(min_length=1)


async def read_fields(request: Request, kind: type[Body], *, max_bytes: int) -> Body:
    """The fields of a request: its JSON body, or the query of a request without one."""
    body = await read_body(request, max_bytes=max_bytes)
    try:
        fields = json.loads(body) if body else dict(request.query_params)
    except (ValueError, RecursionError) as error:
        raise QueueError(400, f"the request body is not JSON: {error}") from error
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise QueueError(400, "; ".join(map(_describe, error.errors()))) from error


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The body of a request; raises QueueError if it is too large."""
    try:
        return await http_server.read_body(request.scope, request.receive, max_bytes)
    except http_server.BodyTooLargeError as error:
        limit = f"rollout.max_body_mib={max_bytes / 2**20:g}"
        raise QueueError(413, f"the request is larger than {limit}: shorten it") from error


def _describe(error: Any) -> str:
    """One clause for an invalid field."""
    where = ".".join(map(str, error["loc"])) or "the request"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"


def check_key(scope: Scope, api_key: str | None) -> None:
    """Raise QueueError unless the request has the key; None asks for no key."""
    if not http_server.has_key(scope, api_key):
        raise QueueError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
