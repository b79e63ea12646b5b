"""One request while it is in the engine: its tokens, how many of them are computed, and the KV-cache blocks it holds.

Only the scheduler changes `blocks`, `slot` and the block hashes; only the output processor appends tokens. The prompt,
the sampling parameters and the limits are fixed when the request arrives.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tunesmith.engine.core.span import BlockRun, extend_runs
from tunesmith.grammar.matcher import TokenMatcher
from tunesmith.types import (
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
    Completion,
    Sampling,
    StopReason,
    TokenDetails,
    TopLogprobs,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Mutable state of one call of `generate`."""

    request_id: int
    """Ids ascend in order of arrival."""
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    order: tuple[int, ...] = ()
    """That of its session, then the index of the call and of the choice."""
    max_model_len: int = sys.maxsize
    token_matcher: TokenMatcher | None = None
    """The state of the reply under the grammar of its distribution."""
    priority: tuple[tuple[int, ...], int] = field(init=False)
    """Lower values are admitted first and preempted last."""
    max_num_tokens: int = field(init=False)
    """Number of prompt and sampled tokens at which `max_tokens` or the model's context ends the request."""
    depends_on_context: bool = field(init=False)
    """Its distribution has penalties, bans or a grammar."""
    token_ids: list[int] = field(init=False)
    """Prompt and sampled tokens."""
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    """Of sampled tokens, if the request asks for them."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """Of sampled tokens, if the request asks for them."""
    blocks: list[int] = field(default_factory=list)
    """KV-cache blocks in order of position."""
    runs: list[BlockRun] = field(default_factory=list)
    """The same blocks as contiguous runs, as far as `find_runs` has extended them."""
    slot: int | None = None
    """Index in the arrays of running requests; None while the request waits, and after it ended."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    cache_version: int = 0
    """Policy version of the oldest keys and values that the request holds, set when it starts to run."""
    is_inflight: bool = False
    """Part of a burst that is not read yet; the scheduler does not schedule it meanwhile."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks of `token_ids`, as far as they were needed."""
    num_published: int = 0
    """Full blocks in the prefix cache, where other requests find them."""
    state_source: int | None = None
    """Slot of the recurrent state from which its next chunk starts, where that is not its own slot."""
    snapshot_blocks: tuple[int, ...] = ()
    """Numbers of blocks after which its prefill keeps a snapshot of the recurrent state."""
    num_cached_tokens: int | None = None
    """Tokens found in the prefix cache at first admission."""

    def __post_init__(self) -> None:
        self.priority = (self.order, self.request_id)
        self.depends_on_context = self.sampling.distribution.depends_on_context
        self.token_ids = list(self.prompt_ids)
        self.max_num_tokens = min(len(self.prompt_ids) + self.sampling.max_tokens, self.max_model_len)

    @property
    def conversation(self) -> tuple[int, ...]:
        """What all turns of a session have in common: its order; empty: none."""
        return self.order[:-2]

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - len(self.prompt_ids)

    def find_runs(self) -> list[BlockRun]:
        """The blocks as contiguous runs; blocks allocated since the last call are added."""
        num_known = sum(run.num_blocks for run in self.runs)
        if num_known < len(self.blocks):
            extend_runs(self.runs, self.blocks[num_known:])
        return self.runs

    def extend(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        policy_version: int,
        details: TokenDetails | None = None,
    ) -> None:
        """Append sampled tokens."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.policy_versions += [policy_version] * len(token_ids)
        if details is not None:
            self.entropies += details.entropies or ()
            self.top_logprobs += details.top_logprobs or ()

    def complete(self, stop_reason: StopReason) -> Completion:
        return Completion(
            sampled_ids=tuple(self.token_ids[len(self.prompt_ids) :]),
            logprobs=tuple(self.logprobs),
            policy_versions=tuple(self.policy_versions),
            stop_reason=stop_reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            entropies=tuple(self.entropies) if self.sampling.return_entropy else None,
            top_logprobs=tuple(self.top_logprobs) if self.sampling.top_logprobs else None,
        )


def check_sampling(prompt_ids: Sequence[int], sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError for a request that would break the batch it is in."""
    distribution = sampling.distribution
    if not prompt_ids:
        raise ValueError("the prompt has no tokens; give at least one")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < vocab_size:
        raise ValueError(f"prompt token ids must lie in [0, {vocab_size}); got {min(prompt_ids)} to {max(prompt_ids)}")
    if sampling.max_tokens < 1:
        raise ValueError(f"max_tokens={sampling.max_tokens} must be at least 1")
    if not 0 <= sampling.top_logprobs <= MAX_TOP_LOGPROBS:
        raise ValueError(f"top_logprobs={sampling.top_logprobs} must lie in [0, {MAX_TOP_LOGPROBS}]")
    _check_penalties(sampling, vocab_size)
    if not 0 <= distribution.temperature < math.inf:
        raise ValueError(f"temperature={distribution.temperature} must be 0 (greedy) or above")
    if not 0 < distribution.top_p <= 1 or not 0 <= distribution.min_p <= 1 or distribution.top_k < 0:
        raise ValueError(
            f"top_p={distribution.top_p} must lie in (0, 1], min_p={distribution.min_p} in [0, 1], "
            f"top_k={distribution.top_k} must be 0 (all) or above"
        )
    for token_id, bias in distribution.logit_bias:
        if not 0 <= token_id < vocab_size or not abs(bias) <= MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias of token {token_id} is {bias}; ids lie in [0, {vocab_size}), values in "
                f"[-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
            )


def _check_penalties(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError for penalties and bans outside of their ranges, or that together may leave no token."""
    distribution = sampling.distribution
    if not MIN_REPETITION_PENALTY <= distribution.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise ValueError(
            f"repetition_penalty={distribution.repetition_penalty} must lie in "
            f"[{MIN_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]"
        )
    if not (math.isfinite(distribution.presence_penalty) and math.isfinite(distribution.frequency_penalty)):
        raise ValueError("presence_penalty and frequency_penalty must be finite")
    if not 0 <= distribution.min_tokens <= sampling.max_tokens:
        raise ValueError(f"min_tokens={distribution.min_tokens} must lie in [0, max_tokens={sampling.max_tokens}]")
    if distribution.min_tokens and sampling.stop:
        raise ValueError(
            "min_tokens cannot delay stop strings, only end-of-sequence and stop token ids: leave out stop"
        )
    banned = [token_id for word in distribution.bad_words for token_id in word] + list(distribution.end_ids)
    if any(not word for word in distribution.bad_words) or not all(0 <= each < vocab_size for each in banned):
        raise ValueError(f"bad_words must be non-empty sequences of ids in [0, {vocab_size})")
    if distribution.grammar and (distribution.min_tokens or distribution.bad_words or sampling.ignore_eos):
        raise ValueError(
            "min_tokens, bad_words and ignore_eos cannot be combined with a grammar, which may allow only the tokens "
            "that they ban"
        )
