"""`SearchTool`: an async function from a query to the text that the model reads.

    passages -> each cut at max_passage_chars -> joined by blank lines

A query that is empty or too long is an error that the model reads; lone surrogates in it, which no request can carry,
are U+FFFD. A source that does not answer raises `ToolUnavailableError`: the rollout becomes a `Failure`, never an
observation. Equal queries that run at the same time, as in the rollouts of a group, are one request.

A source (a search server, an index in this process, Serper, Bing) returns passages for a query or raises
`ToolUnavailableError`; it never returns an empty list because something failed. `find_version` names what the results
depend on besides the query: it is part of the cache's keys.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from tunesmith.errors import ConfigError, StorageError, ToolUnavailableError, shorten
from tunesmith.retrieval.corpus import Passage
from tunesmith.retrieval.index.search import SearchIndex, open_index
from tunesmith.storage import clean_text
from tunesmith.tools.search.settings import MAX_BACKOFF_S, SearchToolSection
from tunesmith.tools.tool import Tool, ToolInputError

logger = logging.getLogger(__name__)
RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
MAX_SHOWN_CHARS = 200
WEB_KEY_HEADERS = {"serper": "X-API-KEY", "bing": "Ocp-Apim-Subscription-Key"}


class SearchSource(Protocol):
    """A source of passages."""

    async def search(self, client: httpx.AsyncClient, query: str, top_n: int) -> list[Passage]:
        """Passages, best first."""


def open_source(settings: SearchToolSection) -> SearchSource:
    """The source that the settings name.

    Raises:
        ConfigError: a web service has no API key.
        DataError: the index is not complete, or its passages cannot be read.
    """
    if settings.source == "index":
        assert settings.index is not None
        return IndexSource(open_index(settings.index))
    key = os.environ.get(settings.key_variable)
    if settings.source == "server":
        return ServerSource(settings, {"Authorization": f"Bearer {key}"} if key else {})
    if not key:
        raise ConfigError(
            f"source: {settings.source} needs an API key in the environment variable {settings.key_variable}"
        )
    return WebSource(settings, {WEB_KEY_HEADERS[settings.source]: key})


class IndexSource:
    """An index, searched in threads of this process."""

    def __init__(self, index: SearchIndex) -> None:
        self._index = index

    async def search(self, client: httpx.AsyncClient, query: str, top_n: int) -> list[Passage]:
        return list(await asyncio.to_thread(self._index.search, query, top_n))


class HttpSource:
    """A source behind the URL of the settings, asked with these headers."""

    def __init__(self, settings: SearchToolSection, headers: Mapping[str, str]) -> None:
        self._settings = settings
        self._headers = headers
        self._url = settings.found_url

    async def find_version(self, client: httpx.AsyncClient) -> str:
        """A name of everything that results depend on besides the query and top_n."""
        return self._url

    async def _fetch(
        self, client: httpx.AsyncClient, method: str, url: str, **content: Any
    ) -> tuple[Any, httpx.Headers]:
        """The JSON of a response, and its headers; `content`: `json` or `params` of the request.

        Raises:
            ToolUnavailableError: all attempts failed, the request was refused, or the response is not JSON.
        """
        settings, problem = self._settings, ""
        for attempt in range(settings.num_retries + 1):
            wait_s = min(settings.backoff_s * 2.0 ** min(attempt, 30), MAX_BACKOFF_S)
            try:
                async with asyncio.timeout(settings.timeout_s):
                    response = await client.request(method, url, headers=self._headers, **content)
            except TimeoutError:
                problem = f"no answer within {settings.timeout_s:g} s"
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            else:
                if response.status_code not in RETRIED_STATUS:
                    return _read_json(response, url), response.headers
                problem = _describe(response)
                wait_s = max(wait_s, _read_retry_after(response))
            if attempt < settings.num_retries:
                logger.debug("search at %s: %s; attempt %d", url, problem, attempt + 1)
                await asyncio.sleep(wait_s)
        raise ToolUnavailableError(
            f"the search at {url} failed {settings.num_retries + 1} times, the last time with: {problem}. Start the "
            "server, or set url; num_retries and timeout_s say how long to wait for it"
        )


class ServerSource(HttpSource):
    """`tunesmith search serve`, or a server with the same interface, such as FlashRAG's."""

    _version: str | None = None

    async def find_version(self, client: httpx.AsyncClient) -> str:
        """The hash of the server's index, from `/health` at first and from each response afterwards."""
        if self._version is None:
            url = f"{self._url}/health"
            health, _ = await self._fetch(client, "GET", url)
            index = health.get("index") if isinstance(health, dict) else None
            self._version = str(index["hash"]) if isinstance(index, dict) and "hash" in index else url
        return self._version

    async def search(self, client: httpx.AsyncClient, query: str, top_n: int) -> list[Passage]:
        url = f"{self._url}/search"
        rows, headers = await self._fetch(client, "POST", url, json={"query": query, "top_n": top_n})
        self._version = headers.get("x-index-hash", self._version)
        try:
            return [Passage(str(row["id"]), str(row["contents"])) for row in rows]
        except (TypeError, KeyError) as error:
            raise ToolUnavailableError(f'{url} did not answer with a list of {{"id", "contents"}}') from error


class WebSource(HttpSource):
    """Google results in the JSON of serper.dev, or results in the JSON of Bing's web search."""

    async def search(self, client: httpx.AsyncClient, query: str, top_n: int) -> list[Passage]:
        if self._settings.source == "serper":
            found, _ = await self._fetch(client, "POST", self._url, json={"q": query, "num": top_n})
            return read_serper(found, self._url)[:top_n]
        found, _ = await self._fetch(client, "GET", self._url, params={"q": query, "count": str(top_n)})
        return read_bing(found, self._url)[:top_n]


def read_serper(found: Any, url: str) -> list[Passage]:
    """The passages of a Serper response: `organic`, and before them `answerBox` and `knowledgeGraph`."""
    if not isinstance(found, dict) or not isinstance(found.get("organic"), list):
        raise ToolUnavailableError(f"{url} did not answer in Serper's form: there is no list `organic`")
    boxes = [found[name] for name in ("answerBox", "knowledgeGraph") if isinstance(found.get(name), dict)]
    passages = [_read_page(row, "link", ("answer", "snippet", "description")) for row in boxes]
    passages += [_read_page(row, "link", ("snippet",)) for row in found["organic"] if isinstance(row, dict)]
    return [passage for passage in passages if passage.contents]


def read_bing(found: Any, url: str) -> list[Passage]:
    """The passages of a Bing response, `webPages.value`; one without `webPages` has no results."""
    if not isinstance(found, dict) or not ("webPages" in found or "queryContext" in found or "_type" in found):
        raise ToolUnavailableError(f"{url} did not answer in Bing's form: there is no `webPages`")
    rows = found.get("webPages", {}).get("value", [])
    passages = [_read_page({"title": row.get("name"), **row}, "url", ("snippet",)) for row in rows]
    return [passage for passage in passages if passage.contents]


def _read_page(row: dict[str, Any], address: str, fields: tuple[str, ...]) -> Passage:
    texts = [row.get("title"), *(row.get(field) for field in fields)]
    contents = "\n".join(text.strip() for text in texts if isinstance(text, str) and text.strip())
    return Passage(str(row.get(address, "")), contents)  # the address is the id


def _read_json(response: httpx.Response, url: str) -> Any:
    if response.status_code != 200:
        raise ToolUnavailableError(f"the search at {url} refused the request: {_describe(response)}")
    try:
        return response.json()
    except ValueError as error:
        raise ToolUnavailableError(f"the search at {url} did not answer with JSON: {_describe(response)}") from error


def _describe(response: httpx.Response) -> str:
    text = " ".join(response.text.split())
    return f"status {response.status_code}, {text[:MAX_SHOWN_CHARS]}"


def _read_retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait; dates and nonsense count as 0."""
    try:
        return min(max(float(response.headers.get("retry-after", "0")), 0.0), MAX_BACKOFF_S)
    except ValueError:
        return 0.0


BUSY_TIMEOUT_S = 30.0
PRUNE = "DELETE FROM results WHERE rowid <= (SELECT max(rowid) FROM results) - ?"
"""Storing gives a row the next rowid, also when it replaces another."""
SCHEMA = "CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, passages TEXT NOT NULL, created REAL NOT NULL)"


class ResultCache:
    """Passages by key. One object serves any number of threads.

    Args:
        max_age_s: age of results that are no longer returned; None returns them forever.
        max_entries: number of results, of which the oldest are removed; None keeps them all.

    Raises:
        StorageError: the file cannot be opened, or is not a cache.
    """

    def __init__(self, path: str | Path, *, max_age_s: float | None = None, max_entries: int | None = None) -> None:
        self._path = Path(path).expanduser()
        self._max_age_s = max_age_s
        self._max_entries = max_entries
        self._lock = threading.Lock()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None
            )
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"cannot use {self._path} as a cache of searches: {error}") from error

    def get(self, key: str) -> list[Passage] | None:
        """The stored passages, or None if there are none or they are too old."""
        found = self._execute("SELECT passages, created FROM results WHERE key = ?", (key,))
        if not found:
            return None
        text, created = found[0]
        if self._max_age_s is not None and time.time() - created > self._max_age_s:
            return None
        return [Passage(*row) for row in json.loads(text)]

    def put(self, key: str, passages: list[Passage]) -> None:
        """Store passages, and remove the oldest over the limit; another process may have stored the same key."""
        text = json.dumps([(each.passage_id, each.contents) for each in passages])
        self._execute("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", (key, text, time.time()))
        if self._max_entries is not None:
            self._execute(PRUNE, (self._max_entries,))

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _execute(self, statement: str, values: tuple[str | float, ...]) -> list[tuple[str, float]]:
        try:
            with self._lock:
                return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StorageError(f"cannot use {self._path} as a cache of searches: {error}") from error


NO_RESULTS = "No results found."
DAY_S = 86400.0
MAX_CONNECTIONS = 64


@dataclass(slots=True)
class _LoopState:
    """The connections of one event loop, and the searches that run in it."""

    client: httpx.AsyncClient
    running: dict[str, asyncio.Task[list[Passage]]] = field(default_factory=dict)


class SearchTool:
    """Searches for an agent.

    Args:
        settings: source, number and length of passages, retries, cache; see `docs/retrieval.md`.
        total_timeout_s: seconds of a search with all its attempts; None leaves it to `num_retries` and `timeout_s`.

    One tool serves all rollouts of a process, from any event loop.

    Raises:
        ConfigError: a web service has no API key.
        DataError: the index is not complete, or its passages cannot be read.
        StorageError: the cache cannot be opened.
    """

    def __init__(self, settings: SearchToolSection | None = None, *, total_timeout_s: float | None = None) -> None:
        self.settings = settings or SearchToolSection()
        self.total_timeout_s = total_timeout_s
        self._source = open_source(self.settings)
        days = self.settings.cache_days
        max_age_s = None if days is None else days * DAY_S
        self._cache = None
        if self.settings.cache is not None:
            self._cache = ResultCache(self.settings.cache, max_age_s=max_age_s, max_entries=self.settings.cache_entries)
        self._states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = weakref.WeakKeyDictionary()

    async def __call__(self, query: str) -> str:
        """The text for the model."""
        return format_passages(await self.find(query), self.settings.max_passage_chars)

    async def find(self, query: str) -> list[Passage]:
        """The passages for a query, best first.

        Raises:
            ToolInputError: the query is empty or too long.
            ToolUnavailableError: the source does not answer, or not in time.
        """
        text = clean_text(" ".join(query.split()))
        if not text:
            raise ToolInputError("the query is empty")
        if len(text) > self.settings.max_query_chars:
            raise ToolInputError(
                f"the query has {len(text)} characters; at most {self.settings.max_query_chars} are allowed"
            )
        state = self._find_state()
        if (task := state.running.get(text)) is None:
            task = state.running[text] = asyncio.create_task(self._search_in_time(state.client, text))
            task.add_done_callback(lambda _: state.running.pop(text, None))
        return await asyncio.shield(task)  # a caller that is cancelled leaves the search to the others

    def build_tool(self) -> Tool:
        """The `Tool` of an environment."""
        settings = self.settings
        return Tool(
            name="search",
            description="Search for passages that answer a query, and return the best ones.",
            parameters={
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to search for."}},
                "required": ["query"],
            },
            run=self,
            text_argument="query",
            timeout_s=None,  # the search has its own limits: those of a Tool would make a dead server an observation
            # every passage fits, with its dots and the blank line
            max_result_chars=max(200, settings.top_n * (settings.max_passage_chars + 5)),
        )

    async def aclose(self) -> None:
        """Close connections of the running event loop, and the cache."""
        if (state := self._states.pop(asyncio.get_running_loop(), None)) is not None:
            await state.client.aclose()
        if self._cache is not None:
            self._cache.close()

    async def _search_in_time(self, client: httpx.AsyncClient, query: str) -> list[Passage]:
        limit = asyncio.timeout(self.total_timeout_s)
        try:
            async with limit:
                return await self._search(client, query)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ToolUnavailableError(
                f"the search at {self.settings.index or self.settings.found_url} has not answered within "
                f"{self.total_timeout_s:g} s, retries included. Start the server, or raise timeout_s of the tool"
            ) from error

    async def _search(self, client: httpx.AsyncClient, query: str) -> list[Passage]:
        top_n = self.settings.top_n
        if self._cache is None:
            return await self._source.search(client, query, top_n)
        key = await self._build_key(client, query)
        if (cached := await asyncio.to_thread(self._cache.get, key)) is not None:
            return cached
        passages = await self._source.search(client, query, top_n)
        # the server may have answered from another index than the one known before
        await asyncio.to_thread(self._cache.put, await self._build_key(client, query), passages)
        return passages

    async def _build_key(self, client: httpx.AsyncClient, query: str) -> str:
        assert isinstance(self._source, HttpSource), "an index takes no cache"
        version = await self._source.find_version(client)
        return json.dumps([self.settings.source, version, query, self.settings.top_n])

    def _find_state(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        if (state := self._states.get(loop)) is None:
            limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
            # the limits of time are those of an attempt as a whole
            state = self._states[loop] = _LoopState(httpx.AsyncClient(limits=limits, timeout=None))
        return state


def format_passages(passages: list[Passage], max_chars: int) -> str:
    """Passages as the model reads them."""
    return "\n\n".join(shorten(each.contents, max_chars) for each in passages) or NO_RESULTS
