"""`SearchTool`: an async function from a query to the text that the model reads.

    passages -> each cut at max_passage_chars -> joined by blank lines

A query that is empty or too long is an error that the model reads. A source that does not answer raises
`ToolUnavailableError`: the rollout becomes a `Failure`, never an observation. Equal queries that run at the same time,
as in the rollouts of a group, are one request.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from dataclasses import dataclass, field

import httpx

from tunesmith.errors import ToolUnavailableError
from tunesmith.tools.search.settings import SearchToolSection
from tunesmith.tools.search.sources import FoundPassage, ResultCache, SearchSource, open_source
from tunesmith.tools.tool import Tool, ToolInputError

NAME = "search"
DESCRIPTION = "Search for passages that answer a query, and return the best ones."
NO_RESULTS = "No results found."
DAY_S = 86400.0
MAX_CONNECTIONS = 64


@dataclass(slots=True)
class _LoopState:
    """The connections of one event loop, and the searches that run in it."""

    client: httpx.AsyncClient
    running: dict[str, asyncio.Task[list[FoundPassage]]] = field(default_factory=dict)


class SearchTool:
    """Searches for an agent.

    Args:
        settings: source, number and length of passages, retries, cache; see `docs/retrieval.md`.
        source: a source of your own, in place of the one that the settings name.
        total_timeout_s: seconds of a search with all its attempts; None leaves it to `num_retries` and `timeout_s`.

    One tool serves all rollouts of a process, from any event loop.

    Raises:
        ConfigError: a web service has no API key.
        DataError: the index is not complete, or its passages cannot be read.
        StorageError: the cache cannot be opened.
    """

    def __init__(
        self,
        settings: SearchToolSection | None = None,
        *,
        source: SearchSource | None = None,
        total_timeout_s: float | None = None,
    ) -> None:
        self.settings = settings or SearchToolSection()
        self.total_timeout_s = total_timeout_s
        self.num_requests = 0
        self.num_cached = 0
        self._source = source or open_source(self.settings)
        days = self.settings.cache_days
        max_age_s = None if days is None else days * DAY_S
        self._cache = None
        if self.settings.cache is not None:
            self._cache = ResultCache(self.settings.cache, max_age_s=max_age_s, max_entries=self.settings.cache_entries)
        self._states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = weakref.WeakKeyDictionary()

    async def __call__(self, query: str) -> str:
        """The text for the model."""
        return format_passages(await self.find(query), self.settings.max_passage_chars)

    async def find(self, query: str, top_n: int | None = None) -> list[FoundPassage]:
        """The passages for a query, best first.

        Raises:
            ToolInputError: the query is empty or too long.
            ToolUnavailableError: the source does not answer, or not in time.
        """
        text = " ".join(query.split())
        if not text:
            raise ToolInputError("the query is empty")
        if len(text) > self.settings.max_query_chars:
            raise ToolInputError(
                f"the query has {len(text)} characters; at most {self.settings.max_query_chars} are allowed"
            )
        state = self._find_state()
        wanted = top_n or self.settings.top_n
        key = json.dumps([text, wanted])
        task = state.running.get(key)
        if task is None:
            task = state.running[key] = asyncio.create_task(self._search_in_time(state.client, text, wanted))
            task.add_done_callback(lambda _: state.running.pop(key, None))
        return await asyncio.shield(task)  # a caller that is cancelled leaves the search to the others

    def build_tool(self, *, name: str = NAME, description: str = DESCRIPTION) -> Tool:
        """The `Tool` of an environment."""
        settings = self.settings
        return Tool(
            name=name,
            description=description,
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
        state = self._states.pop(asyncio.get_running_loop(), None)
        if state is not None:
            await state.client.aclose()
        if self._cache is not None:
            self._cache.close()

    async def _search_in_time(self, client: httpx.AsyncClient, query: str, top_n: int) -> list[FoundPassage]:
        limit = asyncio.timeout(self.total_timeout_s)
        try:
            async with limit:
                return await self._search(client, query, top_n)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ToolUnavailableError(
                f"the search at {self.settings.index or self.settings.found_url} has not answered within "
                f"{self.total_timeout_s:g} s, retries included. Start the server, or raise timeout_s of the tool"
            ) from error

    async def _search(self, client: httpx.AsyncClient, query: str, top_n: int) -> list[FoundPassage]:
        if self._cache is None:
            self.num_requests += 1
            return await self._source.search(client, query, top_n)
        key = await self._build_key(client, query, top_n)
        cached = await asyncio.to_thread(self._cache.get, key)
        if cached is not None:
            self.num_cached += 1
            return cached
        self.num_requests += 1
        passages = await self._source.search(client, query, top_n)
        # the server may have answered from another index than the one known before
        await asyncio.to_thread(self._cache.put, await self._build_key(client, query, top_n), passages)
        return passages

    async def _build_key(self, client: httpx.AsyncClient, query: str, top_n: int) -> str:
        version = await self._source.find_version(client)
        return json.dumps([self.settings.source, version, query, top_n])

    def _find_state(self) -> _LoopState:
        loop = asyncio.get_running_loop()
        state = self._states.get(loop)
        if state is None:
            limits = httpx.Limits(max_connections=MAX_CONNECTIONS)
            # the limits of time are those of an attempt as a whole
            state = self._states[loop] = _LoopState(httpx.AsyncClient(limits=limits, timeout=None))
        return state


def format_passages(passages: list[FoundPassage], max_chars: int) -> str:
    """Passages as the model reads them."""
    return "\n\n".join(shorten(each.contents, max_chars) for each in passages) or NO_RESULTS


def shorten(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def build_search_tool(settings: SearchToolSection | None = None, *, total_timeout_s: float | None = None) -> Tool:
    """The search tool of an environment."""
    return SearchTool(settings, total_timeout_s=total_timeout_s).build_tool()
