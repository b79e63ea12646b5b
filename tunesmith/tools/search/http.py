"""HTTP requests that are repeated while the other side is out of order; what is left is a `ToolUnavailableError`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import httpx

from tunesmith.errors import ToolUnavailableError
from tunesmith.tools.search.settings import MAX_BACKOFF_S, SearchToolSection, find_backoff

logger = logging.getLogger(__name__)
RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
MAX_SHOWN_CHARS = 200


async def fetch_json(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    settings: SearchToolSection,
    *,
    headers: Mapping[str, str],
    body: Mapping[str, Any] | None = None,
    parameters: Mapping[str, str] | None = None,
) -> tuple[Any, httpx.Headers]:
    """The JSON of a response, and its headers.

    Raises:
        ToolUnavailableError: all attempts failed, the request was refused, or the response is not JSON.
    """
    problem = ""
    for attempt in range(settings.num_retries + 1):
        wait_s = find_backoff(settings.backoff_s, attempt)
        try:
            async with asyncio.timeout(settings.timeout_s):
                response = await client.request(method, url, headers=headers, json=body, params=parameters)
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
