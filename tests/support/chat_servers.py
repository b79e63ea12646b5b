"""A server of chat completions in a thread, for models that a run reaches over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


class ChatServer:
    """Answers `/v1/chat/completions` by a function until it is closed; `url` is the base URL for clients."""

    def __init__(self, answer: Callable[[Request], Awaitable[JSONResponse]]) -> None:
        app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            self._thread.join(timeout=0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/v1"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)


def build_completion(model: str, text: str) -> dict[str, object]:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"id": "1", "object": "chat.completion", "created": 0, "model": model, "choices": [choice]}
