"""The HTTP interface: `GET /health`, `POST /search`, `POST /batch_search`, as FlashRAG's and ET-Agent's clients use it.

    /search        {"query": str, "top_n": 10, "return_score": false}     -> [{"id", "contents"}, ...]
    /batch_search  {"query" or "queries": [str, ...], ...}                -> [[{"id", "contents"}, ...], ...]

With `return_score` the answer is a list of two: the documents, and their scores in the same shape. Errors are
`{"detail": sentence}` with status 400 (the request is wrong), 401, 413, 500, or 503 (too much load). Requests are
checked by hand, so that each refusal names what is wrong.

Concurrent searches are ranked in batches, in threads. While one batch is searched the next one collects, so a batch
grows with the load and a lone query never waits for others. The event loop only hands over queries and results.

`build` and `serve` are the commands `tunesmith search build` and `tunesmith search serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunesmith.errors import shorten
from tunesmith.http_server import BodyTooLargeError, format_url, has_key, open_listener, read_body, run_app
from tunesmith.retrieval.index.ranking import Ranking
from tunesmith.retrieval.index.search import SearchIndex, build_index
from tunesmith.retrieval.settings import IndexSettings, ServerSettings

Search = tuple[str, int]
"""A normalized query and its top_n. The index is fixed for the life of a server."""
ENTRY_BYTES = 400
"""Memory of an entry besides its query and its ranking."""
HIT_BYTES = 12


class RankingCache:
    """Least-recently-used cache of at most `max_bytes`; not for several threads."""

    def __init__(self, max_bytes: int) -> None:
        self.num_hits = 0
        self.num_misses = 0
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._rankings: OrderedDict[Search, Ranking] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rankings)

    def get(self, search: Search) -> Ranking | None:
        """The ranking of a search, if it is known."""
        found = self._rankings.get(search)
        if found is None:
            self.num_misses += 1
            return None
        self.num_hits += 1
        self._rankings.move_to_end(search)
        return found

    def put(self, search: Search, ranking: Ranking) -> None:
        """Add a ranking; one that is larger than the whole cache is not kept."""
        size = _measure(search, ranking)
        if size > self._max_bytes or search in self._rankings:
            return
        self._rankings[search] = ranking
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _measure(*self._rankings.popitem(last=False))


def _measure(search: Search, ranking: Ranking) -> int:
    return ENTRY_BYTES + 4 * len(search[0]) + HIT_BYTES * len(ranking)


RankBatch = Callable[[Sequence[Search]], list[Ranking]]


class RequestRefusedError(Exception):
    """A request that is answered with an error status and a sentence."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class Batcher:
    """Ranks searches in batches; used from one event loop. Equal searches that wait or run at the same time are one."""

    def __init__(
        self, rank: RankBatch, cache: RankingCache, *, max_batch: int, max_waiting: int, num_threads: int
    ) -> None:
        self.cache = cache
        self.num_threads = num_threads
        self.num_running = 0
        self.num_batches = 0
        self.num_searches = 0
        self._rank = rank
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tunesmith-search")
        self._waiting: deque[Search] = deque()
        self._futures: dict[Search, asyncio.Future[Ranking]] = {}
        self._is_scheduled = False

    async def find(self, searches: Sequence[Search]) -> list[Ranking]:
        """Rankings of all searches of a request.

        Raises:
            RequestRefusedError: too many queries wait already; none of the request's is searched.
        """
        known = {search: self.cache.get(search) for search in dict.fromkeys(searches)}
        missing = [search for search, ranking in known.items() if ranking is None]
        added = [search for search in missing if search not in self._futures]
        if added and self._waiting and len(self._waiting) + len(added) > self._max_waiting:
            raise RequestRefusedError(503, "too many queries wait (max_waiting of the server); try again later")
        for search in added:
            self._futures[search] = asyncio.get_running_loop().create_future()
            self._waiting.append(search)
        futures = {search: self._futures[search] for search in missing}
        if futures:
            self._schedule()
            await asyncio.wait(futures.values())  # a request that is cancelled leaves the shared futures running
        found = known | {search: future.result() for search, future in futures.items()}
        return [ranking for search in searches if (ranking := found[search]) is not None]

    def close(self) -> None:
        """Wait for running batches; searches that wait are dropped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _schedule(self) -> None:
        """Start batches when all requests that have arrived by now have added their searches."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_batches)

    def _start_batches(self) -> None:
        self._is_scheduled = False
        loop = asyncio.get_running_loop()
        while self._waiting and (num_free := self.num_threads - self.num_running) > 0:
            size = min(self._max_batch, -(-len(self._waiting) // num_free))
            batch = [self._waiting.popleft() for _ in range(size)]
            self.num_running += 1
            self.num_batches += 1
            self.num_searches += size
            running = loop.run_in_executor(self._threads, self._rank, batch)
            running.add_done_callback(functools.partial(self._deliver, batch))

    def _deliver(self, batch: list[Search], done: asyncio.Future[list[Ranking]]) -> None:
        self.num_running -= 1
        futures = [self._futures.pop(search) for search in batch]
        if done.cancelled():
            for future in futures:
                future.cancel()
        elif (error := done.exception()) is not None:
            for future in futures:
                future.set_exception(error)
        else:
            for search, future, ranking in zip(batch, futures, done.result(), strict=True):
                self.cache.put(search, ranking)
                future.set_result(ranking)
        if self._waiting:
            self._schedule()


RETRY_AFTER_S = 1
INDEX_HEADER = "X-Index-Hash"
"""Header of search responses: the hash of the index, by which clients cache them."""


def build_app(index: SearchIndex, settings: ServerSettings | None = None) -> Starlette:
    """The server of one index as an ASGI app."""
    handlers = _SearchHandlers(index, settings or ServerSettings())

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        handlers.batcher.close()

    return Starlette(
        routes=[
            Route("/health", handlers.health, methods=["GET"]),
            Route("/search", functools.partial(handlers.search, is_batch=False), methods=["POST"]),
            Route("/batch_search", functools.partial(handlers.search, is_batch=True), methods=["POST"]),
        ],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((RequestRefusedError, ClientDisconnect, Exception), answer_exception),
    )


async def answer_exception(request: Request, error: Exception) -> Response:
    """A refusal, or 500 for a search that failed, whose traceback is logged by the server."""
    match error:
        case RequestRefusedError():
            headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else None
            return JSONResponse({"detail": error.detail}, status_code=error.status, headers=headers)
        case ClientDisconnect():
            return Response(status_code=400)
    return JSONResponse({"detail": f"the search failed: {type(error).__name__}: {error}"}, status_code=500)


class _SearchHandlers:
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

    async def search(self, request: Request, *, is_batch: bool) -> Response:
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


DEFAULT_TOP_N = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What a client asks for."""

    queries: tuple[str, ...]
    top_n: int
    has_scores: bool


def parse_request(body: bytes, settings: ServerSettings, *, is_batch: bool) -> SearchRequest:
    """Check the JSON of `/search` or `/batch_search`; keys that the server does not know are ignored."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefusedError(400, "the body is not JSON") from error
    if not isinstance(values, dict):
        raise RequestRefusedError(400, "the body is not a JSON object")
    queries = _read_queries(values, is_batch=is_batch)
    if len(queries) > settings.max_queries:
        raise RequestRefusedError(400, f"{len(queries)} queries are more than {settings.max_queries} (max_queries)")
    for number, query in enumerate(queries):
        name = f"query {number}" if is_batch else "query"
        if not query.strip():
            raise RequestRefusedError(400, f"{name} cannot be empty")
        if len(query) > settings.max_query_chars:
            raise RequestRefusedError(
                400, f"{name} has {len(query)} characters, more than {settings.max_query_chars} (max_query_chars)"
            )
    top_n = values.get("top_n", DEFAULT_TOP_N)
    if isinstance(top_n, bool) or not isinstance(top_n, int) or not 1 <= top_n <= settings.max_top_n:
        raise RequestRefusedError(400, f"top_n must be an integer from 1 to {settings.max_top_n}, not {_show(top_n)}")
    has_scores = values.get("return_score", False)
    if not isinstance(has_scores, bool):
        raise RequestRefusedError(400, f"return_score must be true or false, not {_show(has_scores)}")
    return SearchRequest(queries=tuple(queries), top_n=top_n, has_scores=has_scores)


def _read_queries(values: dict[str, Any], *, is_batch: bool) -> list[str]:
    """The value of `query` or of `queries`: a string, or for a batch a list of strings."""
    given = [key for key in ("query", "queries") if values.get(key) is not None]
    if len(given) != 1:
        found = "both are given" if given else "neither is"
        raise RequestRefusedError(400, f"the body must have one of query and queries; {found}")
    value = values[given[0]]
    if not is_batch:
        if not isinstance(value, str):
            raise RequestRefusedError(
                400, f"{given[0]} must be a string, not {_show(value)}; lists go to /batch_search"
            )
        return [value]
    if not isinstance(value, list):
        raise RequestRefusedError(400, f"{given[0]} must be a list of strings, not {_show(value)}")
    for number, each in enumerate(value):
        if not isinstance(each, str):
            raise RequestRefusedError(400, f"{given[0]}[{number}] must be a string, not {_show(each)}")
    return value


def _show(value: Any) -> str:
    return shorten(json.dumps(value), 60)


API_KEY_VARIABLE = "TUNESMITH_SEARCH_API_KEY"


def build(settings: IndexSettings, *, corpus: str, out: str, name: str | None = None, split: str | None = None) -> str:
    info = build_index(corpus, out, settings, name=name, split=split)
    return f"{info.num_passages} passages, {info.settings.kind} index {info.index_hash}: {out}"


SWITCH_INTERVAL_S = 0.0005
"""How long a search may keep the event loop from the interpreter; Python's default is ten times as long."""


def serve(settings: ServerSettings, *, index: str) -> None:
    """Serve an index until the process is interrupted; the API key may come from the environment."""
    settings = settings.model_copy(update={"api_key": settings.api_key or os.environ.get(API_KEY_VARIABLE)})
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    opened = SearchIndex(index, device=settings.device)
    with open_listener(settings.host, settings.port, knob="port") as listener:
        info, url = opened.info, format_url(listener, settings.host)
        # programs that start the server wait for this line
        print(
            f"serving {info.num_passages} passages ({info.settings.kind}, index {info.index_hash}) on {url}", flush=True
        )
        app, has_key = build_app(opened, settings), settings.api_key is not None
        run_app(app, listener, has_key=has_key, public_url=url, lifespan="on")
