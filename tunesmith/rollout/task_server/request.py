"""Requests of workers: their JSON bodies, checked before they reach the queue."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.types import Scope

from tunesmith.http_server import has_key
from tunesmith.rollout.openai_server.app import parse_json, read_limited_body
from tunesmith.rollout.openai_server.fields import ApiError
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
    body = await read_limited_body(request.scope, request.receive, max_bytes)
    fields = parse_json(body) if body else dict(request.query_params)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ApiError(400, "; ".join(map(_describe, error.errors()))) from error


def _describe(error: Any) -> str:
    """One clause for an invalid field."""
    where = ".".join(map(str, error["loc"])) or "the request"
    return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"


def check_key(scope: Scope, api_key: str | None) -> None:
    """Raise ApiError unless the request has the key; None asks for no key."""
    if not has_key(scope, api_key):
        raise ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
