"""The model calls of one rollout as a record that branches of it replay.

A branch runs the workflow again. Its calls before the branch point receive the recorded turns of its parent (the same
ids, logprobs and policy versions) if their prompt and sampling parameters are equal; any difference is a `ReplayError`,
which fails the branch. At the branch point, and after it, the branch samples with its own seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tunesmith.errors import ReplayError
from tunesmith.experience.samples import extends
from tunesmith.tool_log import RecordedToolCall, ToolLog
from tunesmith.types import Completion, OnTokens, Sampling, TokenDetails, Turn, count_equal


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedChoice:
    """A finished choice of a call: the recorded turn, and what the engine returned."""

    turn: Turn
    completion: Completion


@dataclass(slots=True, kw_only=True)
class RecordedCall:
    """One model call of a rollout."""

    index: int
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    """Without the seed."""
    num_tool_calls: int
    """Tool calls that had finished when the model call arrived."""
    is_branch_point: bool
    """Whether it follows a tool result (its prompt extends an earlier turn) and can be replayed up to here."""
    num_open: int = 0
    """Choices that are being sampled, or were cancelled."""
    choices: dict[int, RecordedChoice] = field(default_factory=dict)
    """Finished choices."""

    @property
    def turns(self) -> list[Turn]:
        return [choice.turn for choice in self.choices.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """Where a branch leaves its parent, and what it replays until then."""

    parent: int
    """`run_index` of the parent."""
    parent_owners: tuple[int, ...]
    """`Trajectory.turn_owners` of the parent."""
    index: int
    """The model call that the branch samples anew."""
    calls: Mapping[int, RecordedCall]
    """The parent's calls up to and including that one."""
    tool_calls: tuple[RecordedToolCall, ...]

    @property
    def branch_at(self) -> int:
        return len(self.calls[self.index].prompt_ids)

    @property
    def turn_owners(self) -> tuple[int, ...]:
        """`Trajectory.turn_owners` of the branch."""
        num_shared = sum(len(call.turns) for index, call in self.calls.items() if index < self.index)
        return (self.parent_owners + (self.parent,) * num_shared)[:num_shared]


class RolloutRecord:
    """The model and tool calls of one rollout; replays those of its parent if it is a branch."""

    def __init__(self, *, point: BranchPoint | None = None) -> None:
        self.point = point
        self.on_call: Callable[[RecordedCall], None] | None = None
        """Called with each call that this rollout sampled itself, when all its choices are finished."""
        self.tools = ToolLog(() if point is None else point.tool_calls)
        self.calls: dict[int, RecordedCall] = {}
        self.arriving: dict[int, object] = {}
        """Calls that have an index and do not sample yet, as while they are tokenized, and their asyncio tasks."""
        self.error: str | None = None
        """The first difference to the parent's calls."""
        self.num_prefill_tokens = 0
        """Prompt tokens of the branch point that were not in the prefix cache."""

    @property
    def inherited_turns(self) -> list[Turn]:
        """The parent's turns that this rollout has received."""
        if self.point is None:
            return []
        received = (call for index, call in self.calls.items() if index < self.point.index)
        return [turn for call in received for turn in call.turns]

    @property
    def is_replayed(self) -> bool:
        """Whether the branch point has been reached."""
        return self.point is None or self.point.index in self.calls

    def start(
        self, choice_id: tuple[int, int], prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> RecordedChoice | None:
        """Begin one choice of a call; returns the parent's if the call is before the branch point."""
        index, choice = choice_id
        self.arriving.pop(index, None)
        sampling = replace(sampling, seed=0)
        if self.point is not None and index <= self.point.index:
            recorded = self._find_recorded(index, choice, prompt_ids, sampling)
            if recorded is not None:
                return recorded
        call = self.calls.get(index)
        if call is None:
            call = self.calls[index] = RecordedCall(
                index=index,
                prompt_ids=prompt_ids,
                sampling=sampling,
                num_tool_calls=len(self.tools.calls),
                is_branch_point=self._can_branch(index, prompt_ids, sampling),
            )
        else:
            call.is_branch_point = False
        call.num_open += 1
        return None

    def finish(self, choice_id: tuple[int, int], turn: Turn, completion: Completion) -> None:
        """Add a choice that was sampled to its end."""
        index, choice = choice_id
        call = self.calls[index]
        call.num_open -= 1
        call.choices[choice] = RecordedChoice(turn=turn, completion=completion)
        if self.point is not None and index == self.point.index:
            self.num_prefill_tokens = len(turn.prompt_ids) - completion.num_cached_tokens
        if self.on_call is not None and not call.num_open:
            self.on_call(call)

    def find_failure(self) -> str | None:
        """Why the rollout does not continue its parent; None if it does."""
        if self.error is None and not self.is_replayed:
            assert self.point is not None
            return f"the branch ended before call {self.point.index} to the model, where it should leave its parent"
        return self.error

    def build_point(self, run_index: int, call: RecordedCall) -> BranchPoint:
        """The point at which a branch of this rollout samples `call` anew."""
        return BranchPoint(
            parent=run_index,
            parent_owners=() if self.point is None else self.point.turn_owners,
            index=call.index,
            calls={index: each for index, each in self.calls.items() if index <= call.index},
            tool_calls=tuple(self.tools.calls[: call.num_tool_calls]),
        )

    def _find_recorded(
        self, index: int, choice: int, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> RecordedChoice | None:
        """The parent's choice of an equal call; None at the branch point, which is only checked."""
        assert self.point is not None
        parent = self.point.calls.get(index)
        recorded = None if parent is None else parent.choices.get(choice)
        if parent is None or recorded is None:
            raise self._refuse(f"call {index} to the model was not among those of its parent")
        if prompt_ids != recorded.turn.prompt_ids:
            difference = _describe_difference(prompt_ids, recorded.turn.prompt_ids)
            raise self._refuse(f"call {index} to the model has another prompt ({difference})")
        if sampling != parent.sampling:
            raise self._refuse(f"call {index} to the model has other sampling parameters")
        if index == self.point.index:
            return None
        self.calls[index] = parent
        return recorded

    def _refuse(self, difference: str) -> ReplayError:
        message = f"the branch differs from its parent before it samples: {difference}; see docs/branching.md"
        self.error = self.error or message
        return ReplayError(message)

    def _can_branch(self, index: int, prompt_ids: tuple[int, ...], sampling: Sampling) -> bool:
        """Whether a branch could sample this call anew: it extends an earlier turn, and all earlier calls are done."""
        if sampling.distribution.temperature == 0 or (self.point is not None and index <= self.point.index):
            return False  # the parent has decided on its calls already, the one at the branch point included
        if any(call.num_open for call in self.calls.values()) or min(self.arriving, default=index) < index:
            return False
        earlier = [turn for call in self.calls.values() for turn in call.turns if extends(prompt_ids, turn)]
        return any(len(prompt_ids) > len(turn.prompt_ids) + len(turn.sampled_ids) for turn in earlier)


def deliver_recorded(choice: RecordedChoice, sampling: Sampling, on_tokens: OnTokens | None) -> Completion:
    """The completion of a replayed choice; its tokens, all in the prefix cache, are delivered at once."""
    turn, completion = choice.turn, choice.completion
    if on_tokens is not None:
        details = TokenDetails(entropies=completion.entropies, top_logprobs=completion.top_logprobs)
        has_details = sampling.return_entropy or sampling.top_logprobs > 0
        on_tokens(turn.sampled_ids, turn.logprobs, *((details,) if has_details else ()))
    return replace(completion, num_cached_tokens=len(turn.prompt_ids))


def drop_details(sampling: Sampling, on_tokens: OnTokens | None) -> OnTokens | None:
    """`on_tokens` without the entropies that the record asks for, unless the request asks for details itself."""
    if on_tokens is None or sampling.return_entropy or sampling.top_logprobs:
        return on_tokens
    return lambda token_ids, logprobs, details=None: on_tokens(token_ids, logprobs)


def _describe_difference(one: tuple[int, ...], other: tuple[int, ...]) -> str:
    """The first position at which two prompts differ."""
    position = count_equal(one, other)
    if position == min(len(one), len(other)):
        return f"{len(one)} tokens, not {len(other)}"
    return f"token {position} is {one[position]}, not {other[position]}"
