"""The fields of completion requests that have a meaning here, and how to read one; others are refused, not ignored."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

CHAT_FIELDS = frozenset({
    "chat_template_kwargs", "logprobs", "max_completion_tokens", "messages", "parallel_tool_calls", "reasoning_effort",
    "separate_reasoning", "tool_choice", "tools",
})  # fmt: skip
TEXT_FIELDS = frozenset({"add_special_tokens", "logprobs", "prompt"})
SHARED_FIELDS = frozenset({
    "ignore_eos", "logit_bias", "max_completion_tokens", "max_tokens", "min_p", "model", "n", "return_token_ids",
    "seed", "stop", "stop_token_ids", "stream", "stream_options", "temperature", "top_k", "top_p",
})  # fmt: skip
EXTENDED_FIELDS = frozenset({
    "add_generation_prompt", "bad_words", "continue_final_message", "frequency_penalty", "guided_choice",
    "guided_grammar", "guided_json", "guided_regex", "min_tokens", "presence_penalty", "repetition_penalty",
    "response_format", "return_entropy", "structured_outputs", "top_logprobs",
})  # fmt: skip
"""Fields that a request parser reads or refuses by value."""
INERT_FIELDS = frozenset({
    "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
    "store", "user",
})  # fmt: skip
"""Fields of the API that change nothing in what is sampled: who asks, how it is billed, stored or sped up."""
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Unsupported options -> values that are accepted because they have no effect; null is always accepted."""

CONTINUATION_FIELDS = frozenset({"add_generation_prompt", "continue_final_message", "include_stop_str_in_output"})
"""Options of `NEUTRAL_VALUES` that chat requests may set."""
MAX_NUMBER = 2**63
MAX_SHOWN_CHARS = 80


class RequestError(ValueError):
    """A request that cannot be fulfilled; `param` is the invalid field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def get_field(body: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """The value of a field, or the default if it is missing or null; raises `RequestError` on another type."""
    value = body.get(key)
    if value is None:
        return default
    if kind in (int, float):
        if type(value) in (int, kind) and abs(value) < MAX_NUMBER:
            return kind(value)
    elif isinstance(value, kind):
        return value
    raise RequestError(f"{key} must be {kind.__name__}, got {shorten(value)}", param=key)


def get_number(
    body: Mapping[str, Any],
    key: str,
    kind: type,
    default: Any,
    *,
    low: float,
    high: float,
    is_low_open: bool = False,
) -> Any:
    """As `get_field`, for a number within bounds."""
    value = get_field(body, key, kind, default)
    if not low <= value <= high or (is_low_open and value == low):
        raise RequestError(f"{key}={value} is outside of {'(' if is_low_open else '['}{low}, {high}]", param=key)
    return value


def shorten(value: Any) -> str:
    return textwrap.shorten(repr(value), MAX_SHOWN_CHARS)


def check_fields(body: Any, known: Mapping[str, tuple[Any, ...] | None]) -> dict[str, Any]:
    """The fields of a request that are not null.

    `known`: field -> its only accepted values, or None for a field that is read. Other fields and values are refused.
    """
    if not isinstance(body, dict):
        raise RequestError("the request body must be a JSON object")
    given = {key: value for key, value in body.items() if value is not None}
    for key, value in given.items():
        if key not in known:
            raise RequestError(f"{key} is not supported by this endpoint; leave it out", param=key)
        allowed = known[key]
        if allowed is not None and value not in allowed:
            values = ", ".join(map(repr, allowed)) or "none"
            raise RequestError(f"{key}={value!r:.80} is not supported by this endpoint; allowed: {values}", param=key)
    return given


def read_list(value: Any, param: str) -> list[dict[str, Any]]:
    """A list of objects."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise RequestError(f"{param} must be a list of objects", param=param.partition("[")[0])
    return value


def read_text(value: Any, where: str, types: Sequence[str], *, separator: str = "\n") -> str:
    """Text, or the joined texts of a list of parts of the given types."""
    if isinstance(value, str):
        return value
    texts = []
    for part in read_list(value, where):
        kind = part.get("type")
        if kind not in types:
            raise RequestError(f"{where} has a part of type {kind!r}; allowed: {', '.join(types)}", param=_root(where))
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise RequestError(f"{where} has a part without text", param=_root(where))
        texts.append(text)
    return separator.join(texts)


def _root(where: str) -> str:
    return where.partition("[")[0].partition(".")[0]
