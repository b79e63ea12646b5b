"""Settings of the search tool."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tunesmith.config.section import Section
from tunesmith.retrieval.settings import MAX_TOP_N

URLS = {
    "server": "http://127.0.0.1:1243",
    "serper": "https://google.serper.dev/search",
    "bing": "https://api.bing.microsoft.com/v7.0/search",
}
KEY_VARIABLES = {"server": "TUNESMITH_SEARCH_API_KEY", "serper": "SERPER_API_KEY", "bing": "BING_API_KEY"}


class SearchToolSection(Section):
    """The search tool: where it searches, what the model reads, and what happens when the source does not answer."""

    source: Literal["server", "index", "serper", "bing"] = "server"
    """server: `tunesmith search serve` or a server with its interface; index: an index in this process, for small
    corpora; serper, bing: web search over HTTP in the JSON of these services."""
    url: str | None = None
    """Address of the server or the web service; by default http://127.0.0.1:1243, or the service's own."""
    index: str | None = None
    """With source: index, an index folder, or a JSON Lines file of passages, which is indexed by BM25 at the start."""
    api_key_variable: str | None = None
    """Environment variable with the API key; by default TUNESMITH_SEARCH_API_KEY (needed only if the server wants one),
    SERPER_API_KEY or BING_API_KEY."""
    top_n: int = Field(default=4, ge=1, le=MAX_TOP_N)
    """Passages per search."""
    max_passage_chars: int = Field(default=1200, ge=20)
    """Characters of each passage that the model reads; a longer one is cut and ends in three dots."""
    max_query_chars: int = Field(default=1000, ge=1, le=10_000)
    """Maximum number of characters of a query; a longer one is an error that the model reads."""
    timeout_s: float = Field(default=20.0, gt=0, le=3600, allow_inf_nan=False)
    """Seconds of one attempt."""
    num_retries: int = Field(default=4, ge=0, le=100)
    """Further attempts after one that failed (no connection, timeout, status 429 or 5xx)."""
    backoff_s: float = Field(default=0.5, ge=0, le=60, allow_inf_nan=False)
    """Seconds before the first retry; doubled before each further one, up to 30."""
    cache: str | None = None
    """SQLite file with earlier results, shared by runs and processes on this machine; created if it does not exist."""
    cache_days: float | None = Field(default=None, gt=0)
    """Days after which a cached result is fetched again; by default never."""
    cache_entries: int = Field(default=200_000, ge=1)
    """Results in the cache, of which the oldest are removed; 4 passages of 600 characters take about 2.5 kB."""

    @model_validator(mode="after")
    def _check_source(self) -> SearchToolSection:
        if (self.source == "index") != (self.index is not None):
            raise ValueError("source: index needs a folder or file in index, and no other source takes one")
        if self.source == "index" and (self.url or self.cache):
            raise ValueError("source: index takes no url and no cache: the index is read directly")
        return self

    @property
    def found_url(self) -> str:
        """The address, given or by default; without a slash at its end."""
        return (self.url or URLS[self.source]).rstrip("/")

    @property
    def key_variable(self) -> str:
        return self.api_key_variable or KEY_VARIABLES[self.source]


MAX_BACKOFF_S = 30.0
