"""The base of all engines: the policy's limits and end-of-sequence ids, and the checks and state of a new request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tunesmith.engine.core.output_processor import RequestState
from tunesmith.engine.core.request import Request, check_sampling
from tunesmith.engine.core.stopping import StopConditions, check_stops
from tunesmith.grammar.matcher import GrammarCompiler
from tunesmith.types import OnTokens, Sampling


class UsageTimes:
    """Seconds in which an engine was busy, and idle: it could have sampled, and had no request."""

    def __init__(self) -> None:
        self._seconds = {"busy": 0.0, "idle": 0.0}
        self._state: Literal["busy", "idle"] | None = None
        self._since = 0.0

    def enter(self, state: Literal["busy", "idle"] | None) -> None:
        """The state from now on; None: neither."""
        now = time.perf_counter()
        if self._state is not None:
            self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def take(self) -> dict[str, float]:
        """Metrics since the last call."""
        self.enter(self._state)
        seconds, self._seconds = self._seconds, {"busy": 0.0, "idle": 0.0}
        return {f"perf/engine_{name}_s": value for name, value in seconds.items()}


class BaseEngine:
    """Base of the engines; their requests and versions are their own."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, *, max_model_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._num_requests = 0
        self._usage = UsageTimes()
        self.eos_ids = collect_eos_ids(model, tokenizer)
        self._vocab_size = len(model.get_input_embeddings().weight)
        self.grammars = GrammarCompiler(tokenizer, vocab_size=self._vocab_size, eos_ids=self.eos_ids)
        """The grammars that requests name in their distribution; the trainer replays them, also those of another
        engine."""

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        """Raise ValueError for a request that this engine cannot sample."""
        if len(prompt_ids) >= self.max_model_len:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens fills the context of {self.max_model_len}")
        check_sampling(prompt_ids, sampling, self._vocab_size)
        check_stops(sampling, vocab_size=self._vocab_size, has_tokenizer=self._tokenizer is not None)

    def _build_state(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, on_tokens: OnTokens | None, **fields: Any
    ) -> RequestState:
        """The state of a new request; `fields`: further ones of `Request`."""
        request = Request(
            request_id=self._num_requests,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            max_model_len=self.max_model_len,
            **fields,
        )
        self._num_requests += 1
        stops = StopConditions(request, self._tokenizer, eos_ids=self.eos_ids)
        return RequestState(
            request=request, future=asyncio.get_running_loop().create_future(), on_tokens=on_tokens, stops=stops
        )


def collect_eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """End-of-sequence ids of the generation config, the model config and the tokenizer together."""
    ids: set[int] = set()
    for holder in (model.generation_config, model.config, tokenizer):
        eos = getattr(holder, "eos_token_id", None)
        if eos is not None:
            ids.update(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset(ids)
