"""A choice that is being sampled, with its tokens so far; it becomes a turn however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tunesmith.types import Completion, DeferredTokens, Sampling, TokenDetails, Turn


@dataclass(slots=True, kw_only=True)
class OpenTurn:
    """A choice that is being sampled."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    task: asyncio.Task[Any] | None = None
    """The caller's task, which waits for the engine."""
    is_ended: bool = False
    """The session has ended and cancelled the task's wait."""
    deferred: DeferredTokens | None = None
    """The engine's callback, if nobody reads the tokens while they are sampled."""
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    def end(self) -> None:
        """Cancel the wait for the engine; the caller then undoes the cancellation of its task."""
        self.is_ended = True
        if self.task is not None:
            self.task.cancel()

    def undo_end(self) -> bool:
        """Whether `end`, and nobody else, cancelled the task."""
        return self.is_ended and self.task is not None and self.task.uncancel() == 0

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[float], details: TokenDetails | None, *, policy_version: int
    ) -> None:
        """Add tokens that the engine reports."""
        self.sampled_ids += token_ids
        self.logprobs += logprobs
        self.policy_versions += [policy_version] * len(token_ids)
        if details is not None:
            self.entropies += details.entropies or ()

    def find_version(self, newest: int, *, keeps_cache: bool) -> int:
        """Policy version of tokens that arrive now; with `keeps_cache` that of the first ones."""
        return self.policy_versions[0] if keeps_cache and self.policy_versions else newest

    def list_versions(self) -> list[int]:
        """Policy versions of the tokens so far."""
        self.collect()
        return self.policy_versions

    def collect(self) -> None:
        """Copy the tokens that the engine has kept."""
        if self.deferred is not None and self.deferred.read is not None:
            kept = self.deferred.read()
            self.sampled_ids, self.logprobs = list(kept.sampled_ids), list(kept.logprobs)
            self.policy_versions, self.entropies = list(kept.policy_versions), list(kept.entropies or ())

    def to_turn(self, completion: Completion | None = None) -> Turn:
        """The turn of a choice; without a completion it was cancelled."""
        is_kept = self.deferred is not None and self.deferred.read is not None
        if completion is None:
            self.collect()
            completion = Completion(
                sampled_ids=tuple(self.sampled_ids),
                logprobs=tuple(self.logprobs),
                policy_versions=tuple(self.policy_versions),
                stop_reason="cancelled",
                entropies=tuple(self.entropies) if self.sampling.return_entropy else None,
            )
        assert is_kept or completion.sampled_ids == tuple(self.sampled_ids), "the engine reports each token it samples"
        return Turn(
            prompt_ids=self.prompt_ids,
            sampled_ids=completion.sampled_ids,
            logprobs=completion.logprobs,
            policy_versions=completion.policy_versions,
            distribution=self.sampling.distribution,
            stop_reason=completion.stop_reason,
            entropies=completion.entropies,
            routes=completion.routes,
        )
