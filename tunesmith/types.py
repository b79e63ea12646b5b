"""Records that are passed between packages.

`Task -> (workflow, judge) -> Trajectory -> Group -> advantages -> Sample`. All records are frozen and hold no tensors;
the trainer creates those. A token is trained only if the policy sampled it (`is_sampled`). `None` means unknown, `0.0`
is a measured zero. A failed trajectory has a `Failure` and no reward.

The examples below are one rollout: a task "3 + 4 = ?", two rollouts of it, and the sample that is trained.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from logging import Logger
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic_core import PydanticCustomError

from tunesmith.arguments import suggest_name
from tunesmith.errors import ConfigError

StopReason = Literal["eos", "stop", "length", "context", "cancelled"]
"""Why a turn ended: an end-of-sequence token, a stop string or stop token, `max_tokens`, the model's context, or its
caller, who left."""
TRUNCATED: frozenset[StopReason] = frozenset({"length", "context"})
"""Stop reasons of a reply that was cut off by its length."""

FailureWhere = Literal["workflow", "judge", "timeout", "engine"]


def refuse_text(value: Any) -> Any:
    if isinstance(value, str | bytes):
        raise PydanticCustomError("float_type", "Input should be a number, not text: convert it with float()")
    return value


Number = Annotated[float, BeforeValidator(refuse_text)]
"""A float, an int or bool, or a scalar of numpy or torch. Text is refused, as in rewards that are posted over HTTP."""


class WorkflowOutput(BaseModel):
    """Return value of a workflow. `reward` is ignored if the run has a judge.

    >>> output = WorkflowOutput(response="7", metrics={"tool_calls": 1.0})
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    reward: Number | None = None
    response: Any | None = None
    metrics: dict[str, Number] | None = None


class JudgeOutput(BaseModel):
    """Return value of a judge. `reward` is required; None means no verdict: the rollout is not trained.

    >>> verdict = JudgeOutput(reward=1.0, metrics={"accuracy": 1.0})
    """

    model_config = ConfigDict(extra="forbid")

    reward: Number | None
    metrics: dict[str, Number] | None = None


WorkflowResult = WorkflowOutput | Awaitable[WorkflowOutput]


class Workflow(Protocol):
    """An agent: a function, async or plain, of a task, a row of the data set, and the model bound to this rollout.

    Arguments are passed by name. `functools.partial` objects and objects with `async def __call__` are workflows too.
    `model` is a `ChatModel`, or AgentScope's `OpenAIChatModel` (`rollout.chat_model`), so its type is open.
    """

    def __call__(self, *, task: dict[str, Any], model: Any) -> WorkflowResult: ...


class WorkflowWithModels(Protocol):
    """A workflow that also receives the auxiliary models, by name."""

    def __call__(self, *, task: dict[str, Any], model: Any, auxiliary_models: dict[str, Any]) -> WorkflowResult: ...


class WorkflowWithLogger(Protocol):
    """A workflow that also receives a logger."""

    def __call__(self, *, task: dict[str, Any], model: Any, logger: Logger) -> WorkflowResult: ...


class WorkflowWithModelsAndLogger(Protocol):
    """A workflow that also receives the auxiliary models and a logger."""

    def __call__(
        self, *, task: dict[str, Any], model: Any, auxiliary_models: dict[str, Any], logger: Logger
    ) -> WorkflowResult: ...


class Judge(Protocol):
    """A reward function: an async function of a task and the workflow's response. Arguments are passed by name."""

    def __call__(self, *, task: dict[str, Any], response: Any) -> Awaitable[JudgeOutput]: ...


class JudgeWithModels(Protocol):
    """A judge that also receives the auxiliary models, by name."""

    def __call__(
        self, *, task: dict[str, Any], response: Any, auxiliary_models: dict[str, Any]
    ) -> Awaitable[JudgeOutput]: ...


class JudgeWithLogger(Protocol):
    """A judge that also receives a logger."""

    def __call__(self, *, task: dict[str, Any], response: Any, logger: Logger) -> Awaitable[JudgeOutput]: ...


class JudgeWithModelsAndLogger(Protocol):
    """A judge that also receives the auxiliary models and a logger."""

    def __call__(
        self, *, task: dict[str, Any], response: Any, auxiliary_models: dict[str, Any], logger: Logger
    ) -> Awaitable[JudgeOutput]: ...


WorkflowType = Workflow | WorkflowWithModels | WorkflowWithLogger | WorkflowWithModelsAndLogger
JudgeType = Judge | JudgeWithModels | JudgeWithLogger | JudgeWithModelsAndLogger


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of a data set.

    >>> task = Task(task_id="train/7", index=7, row={"question": "3 + 4 = ?", "answer": "7"})
    """

    task_id: str
    """Unique in the run: `<data set name>/<row index>`."""
    index: int
    """Row index in its data set, from 0."""
    row: Mapping[str, Any]


MIN_TEMPERATURE = 1e-5
"""Smallest temperature besides 0; below it, logits divided by the temperature overflow float32."""
MAX_COUNT = 2**31 - 1
"""Largest `top_k` and `min_tokens`: files of rollouts have 32 bits for them."""
MAX_LOGIT_BIAS = 1e4
MAX_TOP_LOGPROBS = 20
"""Most tokens whose logprobs a request may have for each sampled one, as in the OpenAI API."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
"""Bounds that keep logits finite in float32, whatever the temperature."""
MAX_REWARD = 1e9
"""Largest magnitude of a reward; sums of squares of much larger ones overflow float32."""
MAX_METRIC = 1e100
"""Largest magnitude of a metric; sums of squares of much larger ones overflow float64."""


REWARD_RTOL, REWARD_ATOL = 1e-9, 1e-12
"""Rewards and outcomes that differ by no more than one of these are equal: 0.1 + 0.2 is 0.3, 0.1 + 0.2 - 0.3 is 0."""


def is_above(value: float, limit: float) -> bool:
    """Whether a reward is above a limit by more than rounding.

    AdamW makes a step of full size for an advantage of any size, so a difference by rounding would train as others do.
    """
    return value > limit and not math.isclose(value, limit, rel_tol=REWARD_RTOL, abs_tol=REWARD_ATOL)


def is_at_least(value: float, limit: float) -> bool:
    """Whether a reward is at least a limit, or below it by rounding alone; False for NaN."""
    return value >= limit or math.isclose(value, limit, rel_tol=REWARD_RTOL, abs_tol=REWARD_ATOL)


def count_equal(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of equal items at the start of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def are_equal(values: Sequence[float]) -> bool:
    """Whether rewards are equal but for rounding, so that comparing them gives no advantage."""
    return not values or not is_above(max(values), min(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The distribution that a token is sampled from: logits plus bias, with penalties and bans applied, divided by
    temperature, truncated, renormalized.

    `temperature=0` is greedy decoding; its logprobs are those of the untempered softmax over all tokens that are not
    banned. After the temperature, top-k, top-p and min-p are applied in this order, the last two to the renormalized
    remainder. Tokens with equal logits are kept or dropped together. Penalties and bans depend on the prompt and on the
    tokens sampled so far, so the distribution of a token is determined by this record and the tokens of its turn.

    >>> warm = Distribution(temperature=0.7, top_p=0.95)
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens with less than `min_p` times the probability of the most likely one."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and the value added to its logit."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens of the prompt or the reply are divided by this, negative ones multiplied (Keskar et
    al., 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens of the reply."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens of the reply, once per occurrence."""
    min_tokens: int = 0
    """Ids in `end_ids` are banned until the reply has this many tokens."""
    end_ids: tuple[int, ...] = ()
    """Ids that end the reply; set with `min_tokens` only."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that the reply must not contain: the last id is banned after the others."""
    grammar: str = ""
    """Grammar of the reply in llguidance's format; tokens that cannot continue it are banned. Empty: none."""

    @property
    def depends_on_context(self) -> bool:
        """Whether the tokens before change the distribution, by more than through the model."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_tokens
            or self.bad_words
            or self.grammar
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one completion is sampled and when it ends.

    >>> sampling = Sampling(distribution=warm, max_tokens=64, stop=("</answer>",), seed=1234)
    """

    distribution: Distribution = Distribution()
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the completion, besides the model's end-of-sequence ids."""
    seed: int = 0
    """Seed and token position determine every draw, independent of the batch."""
    ignore_eos: bool = False
    """Continue after end-of-sequence ids, for benchmarks of fixed length."""
    return_entropy: bool = False
    """Return the entropy, in nats, of the distribution that each token was sampled from."""
    top_logprobs: int = 0
    """Return this many most likely tokens of each distribution, with their logprobs."""


TopLogprobs = tuple[tuple[int, float], ...]
"""Ids and logprobs of the most likely tokens of a distribution, most likely first; excluded tokens are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetails:
    """What a request asked for about sampled tokens besides their logprobs; None: not asked for.

    >>> details = TokenDetails(entropies=(0.31, 0.02))
    """

    entropies: tuple[float, ...] | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None

    def first(self, number: int) -> TokenDetails:
        """The details of the first tokens."""
        return TokenDetails(
            entropies=self.entropies and self.entropies[:number],
            top_logprobs=self.top_logprobs and self.top_logprobs[:number],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens of one request. The end-of-sequence token, when sampled, is the last of `sampled_ids`.

    >>> completion = Completion(
    ...     sampled_ids=(22, 2), logprobs=(-0.11, -0.01), policy_versions=(5, 5), stop_reason="eos", num_cached_tokens=3
    ... )
    """

    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    stop_reason: StopReason
    num_cached_tokens: int = 0
    """Prompt tokens reused from the prefix cache."""
    entropies: tuple[float, ...] | None = None
    """With `Sampling.return_entropy`: entropy in nats of the distribution that each token was sampled from."""
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    """With `Sampling.top_logprobs`."""
    routes: Any = field(default=None, compare=False, repr=False)
    """With `trainer.routing_replay`: array [tokens, layers, experts] of the experts of all tokens but the last one."""

    def __post_init__(self) -> None:
        for each in (self.logprobs, self.policy_versions, self.entropies, self.top_logprobs):
            assert each is None or len(each) == len(self.sampled_ids)


OnTokens = Callable[..., None]
"""Called in the event loop with ids and logprobs of tokens as they are sampled, one or several at a time, before
`generate` returns. Requests that ask for entropies or top logprobs get a third argument, `TokenDetails`."""


@dataclass(slots=True)
class DeferredTokens:
    """An `on_tokens` callback that an engine which keeps tokens never calls: it sets `read`, all tokens so far."""

    add: OnTokens
    read: Callable[[], Completion] | None = None

    def __call__(self, *tokens: Any) -> None:
        self.add(*tokens)


class Engine(Protocol):
    """Interface of the sampling engine for rollouts."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion. Queued requests are admitted in ascending `order`.

        Cancelling the awaiting task cancels the request. A prompt that fills the context returns no token (`context`).
        """
        ...

    def pause(self) -> None:
        """Stop sampling; requests stay queued. The trainer may now change the weights."""
        ...

    def resume(self, policy_version: int) -> None:
        """Continue sampling with the current weights; cached keys and values of other versions are dropped."""
        ...

    @property
    def policy_version(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a completion, unless it ignores them."""
        ...

    def compute_stats(self) -> dict[str, float]:
        """Counters since the last call, named `engine/...`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One recorded model call.

    >>> turn = Turn(
    ...     prompt_ids=(1, 18, 10, 19, 28), sampled_ids=(22, 2), logprobs=(-0.11, -0.01), policy_versions=(5, 5),
    ...     distribution=warm, stop_reason="eos",
    ... )
    """

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Logprob of each sampled token under `distribution`, natural log."""
    policy_versions: tuple[int, ...]
    distribution: Distribution
    stop_reason: StopReason
    is_trained: bool = True
    """False if an operator excluded the turn's sampled tokens from training; they remain context of later turns."""
    entropies: tuple[float, ...] | None = None
    """With `Sampling.return_entropy`: entropy in nats of the distribution that each token was sampled from. Not written
    to disk."""
    routes: Any = field(default=None, compare=False, repr=False)
    """As `Completion.routes`, of the last tokens: those before are in an earlier turn. Not written to disk."""

    def __post_init__(self) -> None:
        assert len(self.sampled_ids) == len(self.logprobs) == len(self.policy_versions)
        assert self.entropies is None or len(self.entropies) == len(self.sampled_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a trajectory has no reward: the boundary at which it failed, and the cause.

    >>> failure = Failure(where="workflow", message="KeyError: 'question'", line="agent.py:12 in solve")
    """

    where: FailureWhere
    message: str
    line: str | None = field(default=None, compare=False)
    """The line of user code that raised, waited or blocked, as `file.py:12 in function`; None if unknown."""
    traceback: str | None = field(default=None, compare=False)
    """The traceback of the error that user code raised; None if nothing was raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One run of the workflow on a task.

    >>> right = Trajectory(task=task, run_index=0, turns=(turn,), reward=1.0, response_text="7")
    >>> failed = Trajectory(task=task, run_index=1, turns=(), reward=None, failure=failure)
    """

    task: Task
    run_index: int
    turns: tuple[Turn, ...]
    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    response_text: str = ""
    duration_s: float = 0.0
    parent: int | None = None
    """`run_index` of the rollout that this one branched from; None if it started from the task."""
    branch_at: int | None = None
    """Number of tokens before the first one that the branch sampled itself: the prompt at the branch point."""
    turn_owners: tuple[int, ...] = ()
    """`run_index` of the rollout that sampled each of the first turns, which a branch shares with its parent: (0, 0, 2)
    for a branch of 2, which took its first two turns from 0. Operators may remove these rollouts from the group."""

    def __post_init__(self) -> None:
        assert (self.parent is None) == (self.branch_at is None), "a branch has a parent and a branch point"
        assert (self.reward is None) == (self.failure is not None), "a trajectory has either a reward or a failure"

    @property
    def num_shared_turns(self) -> int:
        """The first turns, which the parent (or its parent) sampled."""
        return len(self.turn_owners)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.sampled_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The trajectories of one task in one step, ordered by `run_index`.

    >>> group = Group(task=task, trajectories=(right, failed))
    >>> len(group.scored)
    1
    """

    task: Task
    trajectories: tuple[Trajectory, ...]
    baseline_reward: float | None = None
    """Reward of an additional greedy rollout, not among `trajectories`; None if there was none or it failed."""

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        return tuple(t for t in self.trajectories if t.reward is not None)

    def map(self, change: Callable[[Trajectory], Trajectory]) -> Group:
        """The group with each trajectory changed."""
        return replace(self, trajectories=tuple(map(change, self.trajectories)))


def compute_outcome(run: Trajectory, outcome_key: str | None, *, knob: str = "experience.outcome_key") -> float:
    """The outcome of a scored rollout; `knob` names the key."""
    assert run.reward is not None
    return run.reward if outcome_key is None else read_metric(run, outcome_key, knob=knob)


def read_metric(run: Trajectory, key: str, *, knob: str) -> float:
    """A metric that every scored rollout must report, because an unknown number is not 0; `knob` names it."""
    if key not in run.metrics:
        nearest = suggest_name(key, list(run.metrics)) if run.metrics else "it reports none"
        raise ConfigError(
            f"{key!r} is not a metric of rollout {run.run_index} of task {run.task.task_id} ({nearest}): report it for "
            f"every rollout from the workflow or the judge, or change {knob}"
        )
    return run.metrics[key]


RunAdvantage = float | tuple[float, ...] | None
"""The advantage of a trajectory, or of each of its turns; None excludes it from training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionSpan:
    """Tokens `start` to `end - 1` of a sample, all sampled from one distribution.

    >>> span = DistributionSpan(start=5, end=7, distribution=turn.distribution)
    """

    start: int
    end: int
    distribution: Distribution
    token_masks: tuple[bytes, ...] | None = None
    """For each token the bits of the ids that the grammar allows, lowest first; the trainer computes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Turns of one trajectory, merged while each prompt extends the previous turn token for token.

    >>> sample = Sample(
    ...     token_ids=(1, 18, 10, 19, 28, 22, 2),
    ...     is_sampled=(False, False, False, False, False, True, True),
    ...     logprobs=(0.0, 0.0, 0.0, 0.0, 0.0, -0.11, -0.01),
    ...     advantages=(0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5),
    ...     policy_versions=(None, None, None, None, None, 5, 5),
    ...     distribution_spans=(span,), group_index=0, trajectory_index=0,
    ... )
    """

    token_ids: tuple[int, ...]
    is_sampled: tuple[bool, ...]
    """True if the policy sampled the token and this sample trains it."""
    logprobs: tuple[float, ...]
    """The sampler's logprob of each sampled token; 0.0 and unused elsewhere."""
    advantages: tuple[float, ...]
    """The advantage of each sampled token; 0.0 and unused elsewhere."""
    policy_versions: tuple[int | None, ...]
    distribution_spans: tuple[DistributionSpan, ...]
    """In order, without overlap; tokens in no span are scored untempered."""
    group_index: int
    """Index of the group in the batch; samples of one group share prefixes."""
    trajectory_index: int
    """Index of the trajectory in the batch, over all groups; samples of one trajectory share it."""
    is_expert: bool = False
    """True if the trained tokens come from an expert demonstration: they have no sampler logprob."""
    routes: Any = field(default=None, compare=False, repr=False)
    """Array [tokens, layers, experts] of the sampler's experts, -1 where they are unknown; None: all are."""

    def __post_init__(self) -> None:
        lengths = {
            len(self.token_ids), len(self.is_sampled), len(self.logprobs), len(self.advantages),
            len(self.policy_versions),
        }  # fmt: skip
        assert len(lengths) == 1, "per-token fields of a sample have one length"
        borders = [border for span in self.distribution_spans for border in (span.start, span.end)]
        assert borders == sorted(borders) and max(borders, default=0) <= len(self.token_ids), "spans are in order"
        assert not (self.is_sampled and self.is_sampled[0]), "the first token of a sample cannot be sampled"
