"""The fields of a request that set sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tunesmith.rollout.openai_server.fields import MAX_NUMBER, RequestError, get_field, get_number, shorten
from tunesmith.types import MIN_TEMPERATURE, Distribution, Sampling

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
