"""Speculation when few requests are left: drafts of a request's next tokens, verified in one forward.

A draft is what followed the longest known occurrence of the request's last tokens, in its own prompt and reply or in
replies that other requests of its group have finished. The engine computes a request's last token and its draft in one
chunk and samples at each of its positions. A draw is a function of seed and position alone, so a token that equals the
draft's is the token that would have been sampled without it, and so is the first that differs; what follows is
discarded, and the next tokens overwrite its keys and values. A draft changes which forward computes a token, never its
distribution.

Whether a draft is worth its forward is decided from the share of drafted tokens that were sampled so far and from fixed
costs, never from time: a run stays a function of its config and seed. Drafts that were not verified count too, once the
request has sampled that far, so a request begins to speculate when its reply begins to repeat something. No tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat, takewhile
from operator import mul

from tunesmith.engine.core.request import Request
from tunesmith.types import count_equal

NGRAM = 3
"""Fewest tokens that an occurrence has in common with the end of a request."""
MAX_MATCHED = 32
"""Tokens that are compared to find out which occurrence is longer."""
MAX_DRAFT = 15
"""Most tokens of a draft; attention on a CPU batches requests of up to one more."""
MAX_REPLY_TOKENS = 1 << 20
"""Tokens of finished replies that are kept; the group that has been kept longest goes first."""
PRIOR_RATE, PRIOR_WEIGHT, DECAY = 0.6, 2.0, 0.9
"""Share of drafted tokens that are expected to be right before any is compared, the number of tokens that this
expectation counts for, and how fast it and earlier tokens fade."""
MAX_WAIT = 8
"""Most steps between two searches in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCost:
    """What a forward that verifies drafts costs, in decode steps of one request."""

    step: float
    """Of one token."""
    row: float
    """Of each further token."""
    context: float
    """Of each 1,024 tokens of the longest context."""


CPU_COST = ForwardCost(step=1.1, row=0.06, context=0.1)
CUDA_COST = ForwardCost(step=4.0, row=0.07, context=0.5)
"""Decode bursts need no answer from the host and split long contexts among programs; a verifying forward does
neither."""


@dataclass(slots=True, eq=False)
class _IndexedTokens:
    """Tokens, and where each n-gram of them has its last occurrence."""

    token_ids: list[int]
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The place of the token that follows."""
    _num_indexed: int = NGRAM

    def find(self, last_ids: Sequence[int]) -> tuple[int, list[int]]:
        """How many of a request's last tokens the longest known occurrence matches, and the tokens that follow it."""
        for place in range(self._num_indexed, len(self.token_ids)):
            self._ends[tuple(self.token_ids[place - NGRAM : place])] = place
        self._num_indexed = max(self._num_indexed, len(self.token_ids))
        end = self._ends.get(tuple(last_ids[-NGRAM:]))
        if end is None:
            return 0, []
        before = zip(reversed(last_ids), reversed(self.token_ids[max(end - MAX_MATCHED, 0) : end]), strict=False)
        num_matched = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], before))
        return num_matched, self.token_ids[end : end + min(num_matched, MAX_DRAFT)]


@dataclass(slots=True, eq=False)
class _History:
    """A request's own tokens, and how often its drafts were right."""

    tokens: _IndexedTokens
    draft: list[int] = field(default_factory=list)
    """The last draft, verified or not."""
    position: int = 0
    """Of its first token."""
    num_right: float = PRIOR_RATE * PRIOR_WEIGHT
    num_compared: float = PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        """The share of compared tokens that were right."""
        return self.num_right / self.num_compared

    def compare(self) -> None:
        """Compare the last draft with what was sampled in its place; tokens after the first wrong one do not count."""
        sampled = self.tokens.token_ids[self.position : self.position + len(self.draft)]
        num_right = count_equal(self.draft, sampled)
        num_compared = num_right + (num_right < len(sampled))
        if num_compared:
            self.num_right = self.num_right * DECAY + num_right
            self.num_compared = self.num_compared * DECAY + num_compared
        self.draft = []


class Drafter:
    """The drafts of all requests of an engine."""

    def __init__(self, *, max_requests: int, cost: ForwardCost) -> None:
        """Nothing is drafted while more than `max_requests` run."""
        self._max_requests = max_requests
        self._cost = cost
        self._histories: dict[int, _History] = {}
        self._replies: dict[tuple[int, ...], _IndexedTokens] = {}
        """Finished replies by group; requests whose `order` begins with the same number are a group."""
        self._num_reply_tokens = 0
        self._num_in_vain = self._num_waiting = 0

    def is_due(self, requests: Sequence[Request]) -> bool:
        """Whether to search now: the engine may have to wait for its device first, so it searches less often where it
        finds nothing."""
        if not 0 < len(requests) <= self._max_requests:
            return False
        self._num_waiting -= 1
        return self._num_waiting < 0

    def propose(self, requests: Sequence[Request], *, max_tokens: int) -> dict[int, list[int]]:
        """Drafts by request id, of at most `max_tokens` tokens together; empty if they are not worth a forward."""
        if not 0 < len(requests) <= self._max_requests:
            return {}
        drafts, gain = {}, 0.0
        # tokens that a decode step would sample in the time of one row
        tokens_per_s = len(requests) / (1 + self._cost.row * (len(requests) - 1))
        for request in requests:
            history = self._find(request)
            chances = accumulate(repeat(history.rate, min(len(history.draft), max_tokens)), mul)
            # a drafted token pays if it is expected to bring more tokens than its row takes away
            gains = list(takewhile(lambda each: each > 0, (each - self._cost.row * tokens_per_s for each in chances)))
            if gains:
                drafts[request.request_id] = history.draft[: len(gains)]
                gain += sum(gains)
                max_tokens -= len(gains)
        longest = max(len(request.token_ids) for request in requests)
        is_worth = gain > (self._cost.step - 1 + self._cost.context * longest / 1024) * tokens_per_s
        self._num_in_vain = 0 if is_worth else self._num_in_vain + 1
        self._num_waiting = min((1 << min(self._num_in_vain, 16)) - 1, MAX_WAIT)
        return drafts if is_worth else {}

    def end(self, request: Request) -> None:
        """Keep the reply of a request that ended, for the others of its group."""
        self._histories.pop(request.request_id, None)
        # the end of the prompt with it, which is how the others find the reply's first tokens
        reply = request.token_ids[max(len(request.prompt_ids) - NGRAM, 0) :]
        self._replies.setdefault(request.order[:1], _IndexedTokens([])).token_ids.extend(reply)
        self._num_reply_tokens += len(reply)
        while self._num_reply_tokens > MAX_REPLY_TOKENS:
            self._num_reply_tokens -= len(self._replies.pop(next(iter(self._replies))).token_ids)

    def _find(self, request: Request) -> _History:
        """The request's history with its newest draft, empty where nothing is known."""
        history = self._histories.setdefault(request.request_id, _History(_IndexedTokens(request.token_ids)))
        history.compare()
        # one token of the step is sampled anyway; drafts end before the request's length limit does
        num_left = request.max_num_tokens - len(request.token_ids) - 1
        if request.depends_on_context or num_left < 1:
            return history
        sources = [history.tokens, self._replies.get(request.order[:1])]
        last_ids = request.token_ids[-MAX_MATCHED:]
        found = [source.find(last_ids) for source in sources if source is not None]
        _, draft = max(found, key=lambda each: each[0])
        history.draft, history.position = draft[:num_left], len(request.token_ids)
        return history
