"""The fields of completion requests that have a meaning here, and how to read one; others are refused, not ignored."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunesmith.types import MIN_TEMPERATURE, Distribution, Sampling

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


SAMPLING_FIELDS = frozenset({
    "temperature", "top_p", "top_k", "min_p", "logit_bias", "max_tokens", "max_completion_tokens", "stop",
    "stop_token_ids", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
    "bad_words", "top_logprobs", "logprobs", "return_entropy",
})  # fmt: skip
"""Options that set sampling parameters."""

MAX_STOPS = 16
MAX_PENALTY = 2.0
"""Largest magnitude of a presence or frequency penalty, as in the OpenAI API."""


def parse_sampling(body: Mapping[str, Any], defaults: Sampling, *, num_top: int) -> Sampling:
    """The defaults, with what the request sets; `num_top`: the tokens whose logprobs it asks for."""
    if SAMPLING_FIELDS.isdisjoint(body):
        return defaults
    old = defaults.distribution
    distribution = Distribution(
        temperature=_parse_temperature(body, old.temperature),
        top_p=get_number(body, "top_p", float, old.top_p, low=0.0, high=1.0, is_low_open=True),
        top_k=max(0, get_number(body, "top_k", int, old.top_k, low=-1, high=math.inf)),
        min_p=get_number(body, "min_p", float, old.min_p, low=0.0, high=1.0),
        logit_bias=_parse_logit_bias(body.get("logit_bias")) if body.get("logit_bias") else old.logit_bias,
        repetition_penalty=get_number(
            body, "repetition_penalty", float, old.repetition_penalty, low=0.0, high=MAX_NUMBER, is_low_open=True
        ),
        presence_penalty=get_number(
            body, "presence_penalty", float, old.presence_penalty, low=-MAX_PENALTY, high=MAX_PENALTY
        ),
        frequency_penalty=get_number(
            body, "frequency_penalty", float, old.frequency_penalty, low=-MAX_PENALTY, high=MAX_PENALTY
        ),
        min_tokens=get_number(body, "min_tokens", int, old.min_tokens, low=0, high=math.inf),
    )
    limit = _choose_limit(body)
    stop = body.get("stop")
    return replace(
        defaults,
        distribution=distribution,
        max_tokens=get_number(body, limit, int, defaults.max_tokens, low=1, high=math.inf),
        stop=defaults.stop if stop is None else _parse_stop(stop),
        stop_token_ids=_parse_stop_token_ids(body, defaults),
        ignore_eos=get_field(body, "ignore_eos", bool, defaults.ignore_eos),
        top_logprobs=num_top,
        return_entropy=get_field(body, "return_entropy", bool, defaults.return_entropy),
    )


def _choose_limit(body: Mapping[str, Any]) -> str:
    """The field that limits the sampled tokens, of two names for the same."""
    old, new = body.get("max_tokens"), body.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise RequestError(
            f"max_tokens={shorten(old)} and max_completion_tokens={shorten(new)} are one limit: give one of them",
            param="max_tokens",
        )
    return "max_tokens" if new is None else "max_completion_tokens"


def _parse_stop(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RequestError(f"stop must be text or a list of at most {MAX_STOPS} non-empty texts", param="stop")
    return tuple(stops)


def _parse_stop_token_ids(body: Mapping[str, Any], defaults: Sampling) -> tuple[int, ...]:
    ids = get_field(body, "stop_token_ids", list, list(defaults.stop_token_ids))
    if not all(type(token_id) is int for token_id in ids):
        raise RequestError("stop_token_ids must be a list of token ids", param="stop_token_ids")
    return tuple(ids)


def _parse_logit_bias(raw: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = sorted((int(token_id), float(bias)) for token_id, bias in raw.items())
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError("logit_bias must map token ids to numbers", param="logit_bias") from error
    if not all(token_id >= 0 and math.isfinite(bias) for token_id, bias in pairs):
        raise RequestError("logit_bias must map token ids to finite numbers", param="logit_bias")
    return tuple(pairs)


def _parse_temperature(body: Mapping[str, Any], default: float) -> float:
    value: float = get_number(body, "temperature", float, default, low=0.0, high=math.inf)
    if 0 < value < MIN_TEMPERATURE:
        raise RequestError(f"temperature={value} must be 0 or at least {MIN_TEMPERATURE}", param="temperature")
    return value
