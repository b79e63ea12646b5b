"""Sessions: who may sample, and what was sampled.

A session is one trajectory's right to call the model; its key is the API key. Each call gets its index, its seed and
its place in the queue on arrival. Every sampled token ends up in exactly one `Turn`, also when the client goes away or
the engine fails. A closed session answers nothing and records nothing.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tunesmith.chat.memo import build_cache_key, load_cache_key, memoize
from tunesmith.chat.messages import (
    MAX_TOOL_LIST_BYTES,
    NUM_CACHED_TOOL_LISTS,
    MatchKey,
    Message,
    compute_match_keys,
)
from tunesmith.chat.renderer import Prompt, Renderer
from tunesmith.errors import EngineError
from tunesmith.rollout.seeds import derive_seed
from tunesmith.rollout.tokenizer_thread import run_tokenizer
from tunesmith.types import Completion, Engine, OnTokens, Sampling, Turn

TEXT_SCOPE = "text"
"""Scope of prompts that are not conversations."""

Place = tuple[int, int]
"""Index of a call in its session, and of a choice in its call."""


class SamplingRefusedError(ValueError):
    """The engine cannot sample as the request asks."""


class SessionClosedError(RuntimeError):
    """The trajectory ended while the request was in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCall:
    """One admitted request."""

    index: int
    """Counts the session's requests in order of arrival."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    keys: tuple[MatchKey, ...]
    scope: str
    """Tools and template variables; turns are gone on from within one scope only."""


@dataclass(slots=True, kw_only=True)
class _InFlightTurn:
    """What a choice in flight has sampled so far."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    task: asyncio.Future[Completion] | None = None
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)

    def to_turn(self) -> Turn:
        return Turn(
            prompt_ids=self.prompt_ids,
            sampled_ids=tuple(self.sampled_ids),
            logprobs=tuple(self.logprobs),
            policy_versions=tuple(self.policy_versions),
            distribution=self.sampling.distribution,
            stop_reason="cancelled",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedReply:
    """A finished turn and the conversation that it ends, to go on from."""

    place: Place
    turn: Turn
    keys: tuple[MatchKey, ...]
    scope: str


class Session:
    """One trajectory's calls; `Recorder.open_session` makes it."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        key: str,
        seed: int,
        order: tuple[int, ...],
        sampling: Sampling,
        has_recording: bool,
    ) -> None:
        self.key = key
        self.sampling = sampling
        """How a request that names nothing else is sampled."""
        self.is_closed = False
        self.num_late_calls = 0
        """Calls that were refused because they came after the end."""
        self.engine_error: str | None = None
        """Type and message of the first error the engine raised."""
        self.num_calls = 0
        self.num_extended = 0
        """Calls whose prompt goes on from a recorded turn."""
        self.num_unextended = 0
        """Calls rendered anew although they go on from a recorded turn: the template could not tell what it adds."""
        self.num_repeats = 0
        """Calls that ask what was asked before: retries, or several answers to one question."""
        self.num_overlong = 0
        """Calls refused because their prompt leaves no room for a token."""
        self._engine = engine
        self._renderer = renderer
        self._seed = seed
        self._order = order
        self._has_recording = has_recording
        self._num_tool_calls = 0
        self._drafts: dict[Place, _InFlightTurn] = {}
        self._turns: dict[Place, Turn] = {}
        self._replies: dict[int, _RecordedReply] = {}
        self._asked: set[tuple[int, str]] = set()

    async def admit(self, prompt: Prompt) -> SessionCall:
        """Take a request in: fix its index on arrival and make its prompt, from a recorded turn where one fits."""
        keys = compute_match_keys(prompt.messages)
        scope = _describe_scope(prompt)
        index = self._count_call((hash(keys), scope))
        found = self._find_reply(keys, scope)
        build = partial(self._build_prompt_ids, prompt, found)
        prompt_ids, is_extended = await run_tokenizer(self._renderer, build, num_characters=prompt.num_characters)
        self.num_extended += is_extended
        self.num_unextended += found is not None and not is_extended
        return SessionCall(index=index, prompt=prompt, prompt_ids=prompt_ids, keys=keys, scope=scope)

    async def admit_text(self, text: str | tuple[int, ...], *, adds_special_tokens: bool) -> SessionCall:
        """Take in a prompt that the client rendered, as text or as token ids."""
        index = self._count_call((hash(text), TEXT_SCOPE))
        if isinstance(text, str):
            encode = partial(
                self._renderer.encode_prompt,
                text,
                adds_special_tokens=adds_special_tokens,
                max_tokens=self._engine.max_model_len,
            )
            text = await run_tokenizer(self._renderer, encode, num_characters=len(text))
        return SessionCall(index=index, prompt=Prompt(messages=()), prompt_ids=text, keys=(), scope=TEXT_SCOPE)

    def _count_call(self, asked: tuple[int, str]) -> int:
        """Index of a new call, which asks this; a call that comes after the run has ended is refused and counted."""
        if self.is_closed:
            self.num_late_calls += 1
            raise SessionClosedError
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self.num_repeats += asked in self._asked
        self._asked.add(asked)
        return index

    def _find_reply(self, keys: tuple[MatchKey, ...], scope: str) -> tuple[int, _RecordedReply] | None:
        """The recorded turn that ends the longest part of the conversation, and how many messages that has."""
        for num_old, digest in reversed(list(_iter_reply_digests(keys, scope))):
            reply = self._replies.get(digest)
            if reply is not None and reply.keys == keys[:num_old] and reply.scope == scope:
                return num_old, reply
        return None

    def _build_prompt_ids(
        self, prompt: Prompt, found: tuple[int, _RecordedReply] | None
    ) -> tuple[tuple[int, ...], bool]:
        """Ids of a prompt, and whether they go on from the recorded turn."""
        max_tokens = self._engine.max_model_len
        if found is not None:
            num_old, reply = found
            prompt_ids = self._renderer.extend(
                prompt,
                num_old=num_old,
                prompt_ids=reply.turn.prompt_ids,
                sampled_ids=reply.turn.sampled_ids,
                is_ended=reply.turn.stop_reason == "eos",
                max_tokens=max_tokens,
            )
            if prompt_ids is not None:
                return prompt_ids, True
        return self._renderer.render(prompt, max_tokens=max_tokens), False

    async def generate(
        self,
        call: SessionCall,
        choice: int,
        sampling: Sampling,
        *,
        seed: int | None = None,
        prefix_ids: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one choice of a call and record it.

        A request's own `seed` is mixed with the session's, so that it repeats within a trajectory and not across a
        group. `prefix_ids` begin the reply without having been sampled.
        """
        if self.is_closed:
            raise SessionClosedError
        place = (call.index, choice)
        parts = (call.index, choice) if seed is None else ("request", seed, choice)
        sampling = replace(sampling, seed=derive_seed(self._seed, *parts))
        draft = _InFlightTurn(prompt_ids=call.prompt_ids + prefix_ids, sampling=sampling)

        def add_tokens(token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
            draft.sampled_ids += token_ids
            draft.logprobs += logprobs
            draft.policy_versions += [self._engine.policy_version] * len(token_ids)
            if on_tokens is not None:
                on_tokens(token_ids, logprobs)

        draft.task = asyncio.ensure_future(
            self._engine.generate(draft.prompt_ids, sampling, order=(*self._order, *place), on_tokens=add_tokens)
        )
        self._drafts[place] = draft
        try:
            completion = await draft.task
        except asyncio.CancelledError:
            self._record(place, draft.to_turn())
            if self.is_closed:
                raise SessionClosedError from None
            raise
        except Exception as error:  # whatever the engine raises is named, and fails this trajectory unless it refuses
            self._record(place, draft.to_turn())
            if isinstance(error, ValueError) and not draft.sampled_ids:
                raise SamplingRefusedError(str(error)) from error
            message = f"{type(error).__name__}: {error}"
            self.engine_error = self.engine_error or message
            raise EngineError(message) from error
        self._record(place, _build_turn(draft, completion))
        if self.is_closed:
            raise SessionClosedError
        return completion

    def _record(self, place: Place, turn: Turn) -> None:
        is_known = self._drafts.pop(place, None) is not None
        is_empty = turn.stop_reason == "cancelled" and not turn.sampled_ids
        if is_known and not is_empty and self._has_recording:
            self._turns[place] = turn

    def record_reply(self, call: SessionCall, choice: int, reply: Message) -> None:
        """Let later conversations go on from this choice, now that the client is told what it says."""
        place = (call.index, choice)
        turn = self._turns.get(place)
        if turn is None:
            return
        keys = call.keys + compute_match_keys([reply])
        *_, (_, digest) = _iter_reply_digests(keys, call.scope)
        known = self._replies.get(digest)
        if known is None or known.place < place:
            self._replies[digest] = _RecordedReply(place=place, turn=turn, keys=keys, scope=call.scope)

    def build_call_id(self) -> str:
        """Id of the next tool call: nine letters and digits, which is what the strictest templates want."""
        self._num_tool_calls += 1
        return f"call{self._num_tool_calls:05d}"

    def end(self) -> None:
        """PendingChatCompletion nothing any more: calls in flight are cancelled, and their tokens so far are recorded."""
        self.is_closed = True
        for place, draft in list(self._drafts.items()):
            self._record(place, draft.to_turn())
            if draft.task is not None:
                draft.task.cancel()

    def close(self) -> tuple[Turn, ...]:
        """End the session; the turns come back in order of arrival."""
        self.end()
        return tuple(self._turns[place] for place in sorted(self._turns))


def _build_turn(draft: _InFlightTurn, completion: Completion) -> Turn:
    assert completion.sampled_ids == tuple(draft.sampled_ids), "the engine reports each token it samples"
    return Turn(
        prompt_ids=draft.prompt_ids,
        sampled_ids=completion.sampled_ids,
        logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
        distribution=draft.sampling.distribution,
        stop_reason=completion.stop_reason,
    )


def _iter_reply_digests(keys: Sequence[MatchKey], scope: str) -> Iterator[tuple[int, int]]:
    """For each assistant message: how many messages end with it, and a digest of those."""
    digest = hash(scope)
    for num_messages, key in enumerate(keys, start=1):
        digest = hash((digest, key))
        if key[0] == "assistant":
            yield num_messages, digest


def _describe_scope(prompt: Prompt) -> str:
    """Tools and template variables as text."""
    tools_and_variables = [list(prompt.tools), list(prompt.variables)]
    cache_key = build_cache_key(tools_and_variables)
    return _dump_scope(tools_and_variables) if cache_key is None else _dump_scope_cached(cache_key)


@memoize(max_entries=NUM_CACHED_TOOL_LISTS, max_length=MAX_TOOL_LIST_BYTES)
def _dump_scope_cached(cache_key: bytes) -> str:
    return _dump_scope(load_cache_key(cache_key))


def _dump_scope(tools_and_variables: list[Any]) -> str:
    return json.dumps(tools_and_variables, sort_keys=True, default=str)


class Recorder:
    """The open sessions of one engine, by key."""

    def __init__(self, engine: Engine, renderer: Renderer) -> None:
        self.engine = engine
        self.renderer = renderer
        self._sessions: dict[str, Session] = {}
        self._stats: dict[str, float] = {}
        self._ended_keys: tuple[set[str], set[str]] = (set(), set())
        """Keys of the sessions closed since the last two calls of `compute_stats`, whose late calls are counted."""

    def open_session(
        self,
        *,
        seed: int,
        sampling: Sampling,
        order: tuple[int, ...] = (),
        key: str | None = None,
        has_recording: bool = True,
    ) -> Session:
        """Open a session; without a key it gets one that cannot be guessed.

        `order` comes before the call's index in the engine's queue. Without recording nothing is kept, and each
        conversation is rendered as the template has it: the way for models that are not trained.
        """
        key = secrets.token_urlsafe(16) if key is None else key
        if key in self._sessions:
            raise ValueError(f"session {key!r} is already open")
        session = Session(
            self.engine,
            self.renderer,
            key=key,
            seed=seed,
            order=order,
            sampling=sampling,
            has_recording=has_recording,
        )
        self._sessions[key] = session
        return session

    def close_session(self, key: str) -> tuple[Turn, ...]:
        """End a session and return its turns in order of arrival."""
        session = self._sessions.pop(key)
        self._ended_keys[0].add(key)
        for name in ("num_calls", "num_extended", "num_unextended", "num_repeats", "num_overlong"):
            self._count(name, getattr(session, name))
        if session.num_late_calls:
            self._count("num_late_calls", session.num_late_calls)
        return session.close()

    def find_session(self, key: str) -> Session | None:
        session = self._sessions.get(key)
        if session is None and any(key in keys for keys in self._ended_keys):
            self._count("num_late_calls", 1)
        return session

    def _count(self, name: str, number: int) -> None:
        self._stats[f"rollout/{name}"] = self._stats.get(f"rollout/{name}", 0.0) + number

    def compute_stats(self) -> dict[str, float]:
        """Counters of the sessions closed since the last call."""
        stats, self._stats = self._stats, {}
        self._ended_keys = (set(), self._ended_keys[0])
        return stats
