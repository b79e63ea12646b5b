"""The scope of a chat request: only a call with the same tools and template variables can extend a recorded turn."""

from __future__ import annotations

import json
from typing import Any

from tunesmith.chat.memo import build_cache_key, load_cache_key, memoize
from tunesmith.chat.messages import MAX_TOOL_LIST_BYTES, NUM_CACHED_TOOL_LISTS
from tunesmith.chat.renderer import Prompt


def describe_scope(prompt: Prompt) -> str:
    """The tools and template variables of a prompt as text."""
    tools_and_variables = [list(prompt.tools), list(prompt.variables)]
    cache_key = build_cache_key(tools_and_variables)
    return _dump_scope(tools_and_variables) if cache_key is None else _dump_scope_cached(cache_key)


@memoize(max_entries=NUM_CACHED_TOOL_LISTS, max_length=MAX_TOOL_LIST_BYTES)
def _dump_scope_cached(cache_key: bytes) -> str:
    return _dump_scope(load_cache_key(cache_key))


def _dump_scope(tools_and_variables: list[Any]) -> str:
    return json.dumps(tools_and_variables, sort_keys=True, default=str)
