"""The HTTP interface: `GET /health`, `POST /search`, `POST /batch_search`, as FlashRAG's and ET-Agent's clients use it.

    /search        {"query": str, "top_n": 10, "return_score": false}     -> [{"id", "contents"}, ...]
    /batch_search  {"query" or "queries": [str, ...], ...}                -> [[{"id", "contents"}, ...], ...]

With `return_score` the answer is a list of two: the documents, and their scores in the same shape. Errors are
`{"detail": sentence}` with status 400 (the request is wrong), 401, 413, 500, or 503 (too much load).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunesmith.http_server import BodyTooLargeError, has_key, read_body
from tunesmith.retrieval.index.ranking import Ranking
from tunesmith.retrieval.index.search import SearchIndex
from tunesmith.retrieval.server.batcher import Batcher, TooManySearchesError
from tunesmith.retrieval.server.cache import RankingCache
from tunesmith.retrieval.server.request import RequestRefusedError, parse_request
from tunesmith.retrieval.settings import ServerSettings

RETRY_AFTER_S = 1
INDEX_HEADER = "X-Index-Hash"
"""Header of search responses: the hash of the index, by which clients cache them."""


def build_app(index: SearchIndex, settings: ServerSettings | None = None) -> Starlette:
    """The server of one index as an ASGI app."""
    handlers = _Handlers(index, settings or ServerSettings())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        handlers.batcher.close()

    return Starlette(
        routes=[
            Route("/health", handlers.health, methods=["GET"]),
            Route("/search", handlers.search, methods=["POST"]),
            Route("/batch_search", handlers.search_batch, methods=["POST"]),
        ],
        lifespan=lifespan,
        exception_handlers={
            RequestRefusedError: answer_refusal,
            TooManySearchesError: answer_too_many,
            ClientDisconnect: answer_nobody,
            Exception: answer_failure,
        },
    )


def answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefusedError)
    return JSONResponse({"detail": error.detail}, status_code=error.status)


def answer_too_many(request: Request, error: Exception) -> Response:
    detail = "too many queries wait (max_waiting of the server); try again later"
    return JSONResponse({"detail": detail}, status_code=503, headers={"Retry-After": str(RETRY_AFTER_S)})


def answer_nobody(request: Request, error: Exception) -> Response:
    """The client is gone."""
    return Response(status_code=400)


def answer_failure(request: Request, error: Exception) -> Response:
    """The search failed; the traceback is logged by the server."""
    return JSONResponse({"detail": f"the search failed: {type(error).__name__}: {error}"}, status_code=500)


class _Handlers:
    def __init__(self, index: SearchIndex, settings: ServerSettings) -> None:
        self.index = index
        self.settings = settings
        self.batcher = Batcher(
            index.rank,
            RankingCache(int(settings.cache_mb * 2**20)),
            max_batch=settings.max_batch,
            max_waiting=settings.max_waiting,
            num_threads=settings.num_threads,
        )

    async def health(self, request: Request) -> Response:
        """State and counters; needs no API key."""
        batcher, info = self.batcher, self.index.info
        return JSONResponse(
            {
                "status": "healthy",
                "retrievers": {
                    "total": batcher.num_threads,
                    "available": batcher.num_threads - batcher.num_running,
                },
                "index": {"hash": info.index_hash, "kind": info.settings.kind, "num_passages": info.num_passages},
                "searches": batcher.num_searches,
                "batches": batcher.num_batches,
                "cache": {
                    "entries": len(batcher.cache),
                    "bytes": batcher.cache.num_bytes,
                    "hits": batcher.cache.num_hits,
                    "misses": batcher.cache.num_misses,
                },
            }
        )

    async def search(self, request: Request) -> Response:
        return await self._find(request, is_batch=False)

    async def search_batch(self, request: Request) -> Response:
        return await self._find(request, is_batch=True)

    async def _find(self, request: Request, *, is_batch: bool) -> Response:
        if not has_key(request.scope, self.settings.api_key):
            raise RequestRefusedError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
        try:
            body = await read_body(request.scope, request.receive, self.settings.max_body_bytes)
        except BodyTooLargeError as error:
            limit = f"{self.settings.max_body_bytes} bytes (max_body_bytes of the server)"
            raise RequestRefusedError(413, f"the body has more than {limit}") from error
        asked = parse_request(body, self.settings, is_batch=is_batch)
        rankings = await self.batcher.find([(self.index.normalize(query), asked.top_n) for query in asked.queries])
        lists = [self._render(ranking) for ranking in rankings]
        content = _join(lists) if is_batch else lists[0]
        if asked.has_scores:
            scores = [ranking.scores.tolist() for ranking in rankings]
            content = _join([content, json.dumps(scores if is_batch else scores[0]).encode()])
        headers = {INDEX_HEADER: self.index.info.index_hash}
        return Response(content, media_type="application/json", headers=headers)

    def _render(self, ranking: Ranking) -> bytes:
        """The passages of a ranking as a JSON list; they are stored in the form in which they are sent."""
        return _join([self.index.passages.read_line(position) for position in ranking.positions.tolist()])


def _join(values: Sequence[bytes]) -> bytes:
    """A JSON list of JSON values."""
    return b"[" + b",".join(values) + b"]"
