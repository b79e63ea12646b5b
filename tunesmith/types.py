"""The nouns that travel between rooms.

`Task -> (workflow, judge) -> Trajectory -> Group -> advantages -> Sample`. Every record is frozen; tensors are born
later, in the trainer. A token trains only if `is_sampled` says that the policy sampled it. `None` is unknown; `0.0` is
a measured zero. A failed trajectory has a `Failure` and no reward.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

StopReason = Literal["eos", "stop", "length", "context", "deadline", "cancelled"]
"""Why a turn ended: an end-of-sequence token, a stop string or stop token, `max_tokens`, the model's context, the
request's deadline, or the client going away."""

FailureWhere = Literal["workflow", "judge", "timeout", "engine"]


class WorkflowOutput(BaseModel):
    """What a workflow returns. `reward` is ignored when a judge is given."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    reward: float | None = None
    response: Any | None = None
    metrics: dict[str, float] | None = None


class JudgeOutput(BaseModel):
    """What a judge returns. `reward` must be given; None says that there is no verdict, and the run is left out."""

    model_config = ConfigDict(extra="forbid")

    reward: float | None
    metrics: dict[str, float] | None = None


WorkflowType = Callable[..., Awaitable[WorkflowOutput]]
JudgeType = Callable[..., Awaitable[JudgeOutput]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a data set."""

    task_id: str
    """Unique in the run: `<data set name>/<row index>`."""
    index: int
    """Row index in its data set, from 0."""
    row: Mapping[str, Any]


MIN_TEMPERATURE = 1e-5
"""Below it, other than exactly 0, logits over the temperature leave the range of float32."""
MAX_REWARD = 1e9
"""Largest magnitude of a reward: sums of squares of much larger ones leave the range of float32."""
MAX_METRIC = 1e100
"""Largest magnitude of a metric: sums of squares of much larger ones leave the range of float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The distribution one token is sampled from: logits + bias, over temperature, truncated, renormalised.

    `temperature=0` is greedy decoding; its logprobs are those of the untempered softmax over the whole vocabulary.
    After tempering come top-k, then top-p, then min-p, the last two on what is left, renormalised. Tokens of equal
    logit share their fate.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than `min_p` times the likeliest one."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and what is added to its logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled and when it ends."""

    distribution: Distribution = Distribution()
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Ends the completion besides the model's own end-of-sequence ids."""
    seed: int = 0
    """With the token's position it fixes every draw, whatever else is in the batch."""
    ignore_eos: bool = False
    """For benchmarks of fixed length."""
    deadline_s: float | None = None
    """Seconds from the request's arrival after which it ends with stop reason `deadline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens of one request. The end-of-sequence token, when sampled, is the last of `sampled_ids`."""

    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    stop_reason: StopReason
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""

    def __post_init__(self) -> None:
        assert len(self.sampled_ids) == len(self.logprobs) == len(self.policy_versions)


OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Called in the event loop with the ids and logprobs of tokens as they are sampled, one or a block of them at a time,
in order, before `generate` returns."""


class Engine(Protocol):
    """The sampler as rollouts see it."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion. Requests that wait together are admitted by ascending `order`.

        Cancelling the awaiting task cancels the request. A prompt that leaves no room in the model's context returns
        no token and stop reason `context`.
        """
        ...

    def pause(self) -> None:
        """Stop sampling; requests stay queued. The trainer may now change the weights."""
        ...

    def resume(self, policy_version: int) -> None:
        """Sample on with the weights as they are now; no key or value of another version is read again."""
        ...

    @property
    def policy_version(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def compute_stats(self) -> dict[str, float]:
        """Counters since the last call, named `engine/...`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One recorded model call."""

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each sampled token under `distribution`, natural log."""
    policy_versions: tuple[int, ...]
    distribution: Distribution
    stop_reason: StopReason
    is_trained: bool = True
    """False where an operator took what the turn sampled out of training; it stays as context of later turns."""

    def __post_init__(self) -> None:
        assert len(self.sampled_ids) == len(self.logprobs) == len(self.policy_versions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trajectory has no reward: the boundary that was crossed and the cause."""

    where: FailureWhere
    message: str
    line: str | None = field(default=None, compare=False)
    """The line of user code that raised, waited or blocked, as `file.py:12 in function`; None is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One run of the workflow on a task."""

    task: Task
    run_index: int
    turns: tuple[Turn, ...]
    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    response_text: str = ""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        assert (self.reward is None) == (self.failure is not None), "a trajectory has a reward or a failure, never both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one task in one step, ordered by `run_index`."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    baseline_reward: float | None = None
    """Reward of a greedy run that is none of `trajectories`; None where there was none, or where it failed."""

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.reward is not None)


RunAdvantage = float | tuple[float, ...] | None
"""The advantage of a run, or of each of its turns; None does not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionSpan:
    """Tokens `start` to `end - 1` of a sample, all sampled from one distribution."""

    start: int
    end: int
    distribution: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Turns of one trajectory merged while each prompt extends the last one token for token."""

    token_ids: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    """True where the policy sampled the token and this sample is the one that trains it."""
    logprobs: tuple[float, ...]
    """The sampler's logprob of each sampled token; 0.0 elsewhere and never read there."""
    advantages: tuple[float, ...]
    """The advantage of each sampled token; 0.0 elsewhere and never read there."""
    policy_versions: tuple[int | None, ...]
    distribution_spans: tuple[DistributionSpan, ...]
    """In order, without overlap; tokens in no span are scored untempered."""
    group_index: int
    """Which group of the batch; samples of one group share prefixes."""
    trajectory_index: int
    """Which trajectory of the batch, counted over all groups; samples of one trajectory share it."""
    is_expert: bool = False
    """The tokens that train were given by an expert, not sampled: they have no sampler's logprob."""

    def __post_init__(self) -> None:
        lengths = {
            len(self.token_ids), len(self.is_sampled), len(self.logprobs), len(self.advantages),
            len(self.policy_versions),
        }  # fmt: skip
        assert len(lengths) == 1, "per-token fields of a sample have one length"
        borders = [border for span in self.distribution_spans for border in (span.start, span.end)]
        assert borders == sorted(borders) and max(borders, default=0) <= len(self.token_ids), "spans are in order"
        assert not (self.is_sampled and self.is_sampled[0]), "the first token of a sample cannot be sampled"
