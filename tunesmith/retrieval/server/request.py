"""The body of a search request, checked by hand so that each refusal names what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tunesmith.retrieval.settings import ServerSettings

DEFAULT_TOP_N = 10


class RequestRefusedError(Exception):
    """A request that is answered with an error status and a sentence."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


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
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
