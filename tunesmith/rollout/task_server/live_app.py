"""The HTTP interface for live traffic, as an ASGI app.

    /v1/...  with the header X-Session-Id       the model endpoint; the header names the conversation
    /sessions/{session_id}/v1/...               the same, for clients that cannot send the header
    POST /sessions/{session_id}/reward          {"reward", "metrics", "response"}: feedback
    GET /health

Every request but that for health asks for the key of the server, if there is one.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tunesmith.rollout.openai_server.fields import ApiError
from tunesmith.rollout.task_server.app import EXCEPTION_HANDLERS, RequestLimit, ServerLimits
from tunesmith.rollout.task_server.live import LiveSessions
from tunesmith.rollout.task_server.request import MAX_NAME_CHARS, RewardReport, check_key, read_fields
from tunesmith.types import WorkflowOutput

SESSION_HEADER = "x-session-id"


def build_live_app(sessions: LiveSessions, model_app: ASGIApp, limits: ServerLimits) -> ASGIApp:
    """The app of one run; `model_app` is the model endpoint, with session keys in its paths (`/t/{key}/v1`)."""

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", "num_open": sessions.num_open, "num_scored": sessions.num_scored})

    async def reward(request: Request) -> Response:
        check_key(request.scope, limits.api_key)
        session_id = str(request.path_params["session_id"])
        sessions.check_open(session_id)
        report = await read_fields(request, RewardReport, max_bytes=limits.max_body_bytes)
        if report.reward is None:
            raise ApiError(400, "reward: missing; post a number")
        feedback = WorkflowOutput(reward=report.reward, response=report.response, metrics=report.metrics)
        sessions.add_feedback(session_id, feedback)
        return JSONResponse({"status": "accepted"})

    model = _LiveModel(sessions, model_app, limits)
    routes = [
        Route("/health", health, methods=["GET"]),
        Route("/sessions/{session_id}/reward", reward, methods=["POST"]),
        Mount("/sessions/{session_id}/v1", model),
        Mount("/v1", model),
    ]
    return RequestLimit(Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS), limits.max_requests)


class _LiveModel:
    """Passes model calls to the endpoint, each in the session that its path or its header names."""

    def __init__(self, sessions: LiveSessions, model_app: ASGIApp, limits: ServerLimits) -> None:
        self._sessions = sessions
        self._model_app = model_app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        check_key(scope, self._limits.api_key)
        rest = scope["path"].split("/v1/", 1)[-1]
        if scope["method"] != "POST":
            await self._pass(f"/v1/{rest}", scope, receive, send)
            return
        session_id = scope["path_params"].get("session_id") or headers.get(SESSION_HEADER, "").strip()
        if not 0 < len(session_id) <= MAX_NAME_CHARS:
            advice = f"send the header X-Session-Id (1 to {MAX_NAME_CHARS} characters), or use /sessions/ID/v1"
            raise ApiError(400, f"the request names no conversation: {advice}")
        live = self._sessions.find_or_open(session_id)
        with live.call():
            await self._pass(f"/t/{live.session.key}/v1/{rest}", scope, receive, send)

    async def _pass(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": "", "path_params": {}}
        await self._model_app(inner, receive, send)
