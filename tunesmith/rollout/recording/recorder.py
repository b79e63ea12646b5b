"""Sessions: they authorize the model calls of a trajectory and record them as turns.

A session belongs to one trajectory; its key is the API key. A call gets its index, and with it its seed and its order
in the engine's queue, on arrival. Every sampled token is recorded in exactly one `Turn`, also if the client disconnects
or the engine fails. A closed session refuses all calls and records nothing.

Long texts are tokenized in a thread, so that they do not block the event loop. On an `EngineLoop`, engines wait for
calls in threads, so what is sampled does not depend on the thread's timing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from tunesmith.chat.conversation import EMPTY, Conversation, ConversationCache
from tunesmith.chat.messages import MatchKey, Message
from tunesmith.chat.renderer import Prompt, Renderer
from tunesmith.errors import EngineError
from tunesmith.experience.samples import extends
from tunesmith.rollout.recording.open_turn import OpenTurn
from tunesmith.rollout.recording.replay import RolloutRecord, deliver_recorded, drop_details
from tunesmith.rollout.recording.reply_texts import ChoiceId, EarlierTurn, RecordedReply, ReplyTexts
from tunesmith.rollout.seeds import derive_seed
from tunesmith.types import Completion, DeferredTokens, Engine, OnTokens, Sampling, TokenDetails, Turn

LONG_CHARACTERS = 32768
"""Texts up to this length are tokenized on the event loop, which they block for less than 20 ms."""
TEXT_SCOPE = "text"
"""Scope of text prompts (/v1/completions), which are not conversations."""


class SamplingRefusedError(ValueError):
    """The engine rejects the sampling parameters of the request."""


class SessionClosedError(RuntimeError):
    """The session has ended, before or during the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionCall:
    """One admitted model call of a session."""

    index: int
    """Position in the session's calls, in order of arrival."""
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    conversation: Conversation

    @property
    def keys(self) -> tuple[MatchKey, ...]:
        return self.conversation.keys


class ObservedConversation(NamedTuple):
    """A call's messages and its reply, as the recorder matches later calls with them."""

    call_index: int
    scope: str
    keys: tuple[MatchKey, ...]
    """The last one is that of the reply."""


class Session:
    """The model calls of one trajectory; created by `Recorder.open_session`."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        key: str,
        seed: int,
        order: tuple[int, ...],
        sampling: Sampling,
        is_recorded: bool,
    ) -> None:
        self.key = key
        self.sampling = sampling
        """Defaults for sampling parameters that a request leaves out."""
        self.is_closed = False
        self.num_late_calls = 0
        """Calls refused because they arrived after the session ended."""
        self.record: RolloutRecord | None = None
        """The calls as branches replay them; None if the rollout cannot branch."""
        self.gate: asyncio.Event | None = None
        """Calls wait while it is not set; None: they never wait."""
        self.keeps_cache = False
        """Calls continue over keys and values of older weights (`rollout.stale_cache=keep`)."""
        self.engine_error: str | None = None
        """Type and message of the first engine error."""
        self.num_calls = 0
        self.num_extended = 0
        """Calls whose prompt extends a recorded turn."""
        self.num_unextended = 0
        """Calls that continue a recorded turn but were rendered from scratch, because the delta is undetermined."""
        self.num_repeats = 0
        """Calls with the same prompt as an earlier call: retries, or several samples for one prompt."""
        self.num_overlong = 0
        """Calls refused because the prompt leaves no room for a sampled token."""
        self._engine = engine
        self._renderer = renderer
        self._seed = seed
        self._order = order
        self._is_recorded = is_recorded
        self._num_tool_calls = 0
        self._open_turns: dict[ChoiceId, OpenTurn] = {}
        self._turns: dict[ChoiceId, Turn] = {}
        self._replies: dict[tuple[int, str], list[RecordedReply]] = {}
        """By digest of the conversation up to the reply, and scope."""
        self.conversations = ConversationCache()
        """Parses the messages of requests."""
        self.stored_responses: dict[str, list[dict[str, Any]]] = {}
        """Messages up to each stored response of the Responses API, without the instructions."""
        self._reply_texts = ReplyTexts(renderer)
        self._seen_requests: set[tuple[int, str]] = set()

    async def admit(self, prompt: Prompt) -> SessionCall:
        """Assign the call's index and build its prompt ids, extending a recorded turn if one matches."""
        conversation = self.conversations.find(prompt.messages)
        index = self._count_call((hash((conversation.digest, prompt.reply_start)), prompt.scope))
        prompt_ids, is_extended, is_found = await self._build_prompt_ids(prompt, conversation)
        self.num_extended += is_extended
        self.num_unextended += is_found and not is_extended
        return SessionCall(index=index, prompt=prompt, prompt_ids=prompt_ids, conversation=conversation)

    async def build_prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt ids that `admit` would build now, without counting a call."""
        if self.is_closed:
            raise SessionClosedError
        prompt_ids, *_ = await self._build_prompt_ids(prompt, self.conversations.find(prompt.messages))
        return prompt_ids

    async def admit_text(self, text: str | tuple[int, ...], *, adds_special_tokens: bool) -> SessionCall:
        """As `admit`, for a prompt that the client rendered, given as text or token ids."""
        index = self._count_call((hash(text), TEXT_SCOPE))
        if isinstance(text, str):
            encode = partial(
                self._renderer.encode_prompt,
                text,
                adds_special_tokens=adds_special_tokens,
                max_tokens=self._engine.max_model_len,
            )
            text = await run_tokenizer(self._renderer, encode, num_characters=len(text))
        prompt = Prompt(messages=(), scope=TEXT_SCOPE)
        return SessionCall(index=index, prompt=prompt, prompt_ids=text, conversation=EMPTY)

    def _count_call(self, request_key: tuple[int, str]) -> int:
        """Index of a new call; calls after the end of the session are counted and refused."""
        if self.is_closed:
            self.num_late_calls += 1
            raise SessionClosedError
        index, self.num_calls = self.num_calls, self.num_calls + 1
        self.num_repeats += request_key in self._seen_requests
        self._seen_requests.add(request_key)
        if self.record is not None:
            self.record.arriving[index] = asyncio.current_task()
        return index

    def refuse(self) -> None:
        """The current task's call is refused before it samples, as it will be when a branch repeats it."""
        if self.record is not None:
            task, arriving = asyncio.current_task(), self.record.arriving
            self.record.arriving = {index: each for index, each in arriving.items() if each is not task}

    def _find_earlier_turn(self, conversation: Conversation, scope: str) -> EarlierTurn | None:
        """The recorded turn with the longest matching prefix of the conversation."""
        keys = conversation.keys
        for num_old, digest in reversed(conversation.reply_digests):
            message = conversation.messages[num_old - 1]
            equal = [each for each in self._replies.get((digest, scope), ()) if each.keys == keys[:num_old]]
            if equal:  # samples of one prompt may differ in nothing but their reasoning
                reply = max(equal, key=lambda each: (each.count_equal(message), each.choice_id))
                return EarlierTurn(turn=reply.turn, num_messages=num_old)
            extended = self._reply_texts.find_extended((keys[: num_old - 1], scope), message)
            if extended is not None:
                return EarlierTurn(turn=extended[0].turn, num_messages=num_old, appended=extended[1])
        return None

    async def _build_prompt_ids(self, prompt: Prompt, conversation: Conversation) -> tuple[tuple[int, ...], bool, bool]:
        """Prompt ids, whether they extend a recorded turn, and whether the prompt continues one."""
        max_tokens = self._engine.max_model_len
        found = self._find_earlier_turn(conversation, prompt.scope)
        continued = None
        if prompt.reply_start:
            continued = self._reply_texts.find((conversation.keys, prompt.scope), prompt.reply_start)
        build: Callable[[], tuple[int, ...] | None]
        if continued is not None:
            rest = prompt.reply_start[len(continued.text or "") :]
            build = partial(self._renderer.encode_content, rest, max_tokens=max_tokens)
            rest_ids = await run_tokenizer(self._renderer, build, num_characters=len(rest))
            return (*continued.token_ids, *rest_ids), True, True
        if found is not None:
            build = partial(
                self._renderer.extend,
                prompt,
                num_old=found.num_messages,
                prompt_ids=found.turn.prompt_ids,
                sampled_ids=found.turn.sampled_ids,
                is_ended=found.turn.stop_reason == "eos",
                appended=found.appended,
                max_tokens=max_tokens,
            )
            new = prompt.messages[found.num_messages :]
            num_new = sum(message.num_characters for message in new) + len(found.appended) + len(prompt.reply_start)
            prompt_ids = await run_tokenizer(self._renderer, build, num_characters=num_new)
            if prompt_ids is not None:
                return prompt_ids, True, True
        render = partial(self._renderer.render, prompt, max_tokens=max_tokens)
        num_characters = conversation.num_characters + len(prompt.reply_start)
        return await run_tokenizer(self._renderer, render, num_characters=num_characters), False, found is not None

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

        A `seed` in the request is combined with the session's: equal seeds repeat within a trajectory, but not across
        a group. `prefix_ids` are the start of the reply that is not sampled (a forced tool call).
        """
        if self.gate is not None:
            await self.gate.wait()
        if self.is_closed:
            raise SessionClosedError
        choice_id = (call.index, choice)
        parts = (call.index, choice) if seed is None else ("request", seed, choice)
        sampling = replace(sampling, seed=derive_seed(self._seed, *parts))
        prompt_ids = call.prompt_ids + prefix_ids
        if self.record is not None:
            on_tokens = drop_details(sampling, on_tokens)
            replayed = self.record.start(choice_id, prompt_ids, sampling)
            if replayed is not None:
                self._turns[choice_id] = replayed.turn
                return deliver_recorded(replayed, sampling, on_tokens)
            sampling = replace(sampling, return_entropy=True)
        open_turn = OpenTurn(prompt_ids=prompt_ids, sampling=sampling, task=asyncio.current_task())

        def add_tokens(
            token_ids: Sequence[int], logprobs: Sequence[float], details: TokenDetails | None = None
        ) -> None:
            version = open_turn.find_version(self._engine.policy_version, keeps_cache=self.keeps_cache)
            open_turn.add(token_ids, logprobs, details, policy_version=version)
            if on_tokens is not None:
                on_tokens(token_ids, logprobs, *(() if details is None else (details,)))

        open_turn.deferred = DeferredTokens(add_tokens) if on_tokens is None else None
        report = open_turn.deferred or add_tokens
        self._open_turns[choice_id] = open_turn
        try:
            completion = await self._engine.generate(
                prompt_ids, sampling, order=(*self._order, *choice_id), on_tokens=report
            )
        except asyncio.CancelledError:
            self._record(choice_id, open_turn.to_turn())
            if open_turn.undo_end():
                raise SessionClosedError from None
            raise
        except Exception as error:
            self._record(choice_id, open_turn.to_turn())
            raise self._translate_error(error, open_turn) from error
        turn = open_turn.to_turn(completion)
        open_turn.deferred = None  # its callback holds the turn: the engine's request would live until a collection
        if turn.routes is not None:  # a long conversation would keep those of its first turns many times
            earlier = (each for each in self._turns.values() if each.routes is not None and extends(prompt_ids, each))
            num_known = max((len(each.prompt_ids) + len(each.sampled_ids) - 1 for each in earlier), default=0)
            turn, completion = replace(turn, routes=turn.routes[num_known:].copy()), replace(completion, routes=None)
        self._record(choice_id, turn)
        if self.is_closed:
            raise SessionClosedError
        if self.record is not None:
            self.record.finish(choice_id, turn, completion)
        return completion

    def _translate_error(self, error: Exception, open_turn: OpenTurn) -> Exception:
        """An error of the engine fails the trajectory, except a rejected request."""
        open_turn.collect()
        if isinstance(error, ValueError) and not open_turn.sampled_ids:
            return SamplingRefusedError(str(error))
        message = f"{type(error).__name__}: {error}"
        self.engine_error = self.engine_error or message
        return EngineError(message)

    def _record(self, choice_id: ChoiceId, turn: Turn) -> None:
        is_open = self._open_turns.pop(choice_id, None) is not None
        is_empty = turn.stop_reason == "cancelled" and not turn.sampled_ids
        if is_open and not is_empty and self._is_recorded:
            self._turns[choice_id] = turn

    def record_reply(self, call: SessionCall, choice: int, reply: Message, *, cut_stop: str = "") -> None:
        """Store the parsed reply, so that later calls can extend or continue its turn; `cut_stop` was cut off it."""
        choice_id = (call.index, choice)
        turn = self._turns.get(choice_id)
        if turn is None:
            return
        reply_start, scope = call.prompt.reply_start, call.prompt.scope
        if reply_start:
            reply = replace(reply, content=reply_start + reply.content)
        digest, keys = call.conversation.identify_reply(reply)
        recorded = RecordedReply(
            choice_id=choice_id, turn=turn, keys=keys, message=reply, reply_start=reply_start, cut_stop=cut_stop,
            has_prefix=len(turn.prompt_ids) > len(call.prompt_ids),
        )  # fmt: skip
        if not reply.tool_calls:
            self._reply_texts.add((call.keys, scope), recorded)
        self._replies.setdefault((digest, scope), []).append(recorded)

    def list_conversations(self) -> tuple[ObservedConversation, ...]:
        replies = [(each, scope) for (_, scope), equal in self._replies.items() for each in equal]
        return tuple(ObservedConversation(each.choice_id[0], scope, each.keys) for each, scope in replies)

    def count_tokens(self) -> tuple[int, int]:
        """Prompt tokens and sampled tokens of the turns so far; a prompt counts in every call."""
        turns = self._turns.values()
        return sum(len(turn.prompt_ids) for turn in turns), sum(len(turn.sampled_ids) for turn in turns)

    def find_oldest_version(self) -> int | None:
        """Policy version of the oldest sampled token, of open calls too; None: nothing is sampled yet."""
        recorded = [turn.policy_versions for turn in self._turns.values()]
        open_versions = [call.list_versions() for call in self._open_turns.values()]
        return min((min(versions) for versions in (*recorded, *open_versions) if versions), default=None)

    def build_call_id(self) -> str:
        """Id of the next tool call: nine alphanumeric characters, as the strictest templates require."""
        self._num_tool_calls += 1
        return f"call{self._num_tool_calls:05d}"

    def end(self) -> None:
        """Refuse further calls; open calls are cancelled and their tokens so far recorded."""
        self.is_closed = True
        for choice_id, open_turn in list(self._open_turns.items()):
            self._record(choice_id, open_turn.to_turn())
            open_turn.end()

    def close(self) -> tuple[Turn, ...]:
        """End the session; returns the turns in order of arrival."""
        self.end()
        return tuple(self._turns[choice_id] for choice_id in sorted(self._turns))


class Recorder:
    """Opens and closes the sessions of one engine."""

    def __init__(self, engine: Engine, renderer: Renderer) -> None:
        self.engine = engine
        self.renderer = renderer
        self._sessions: dict[str, Session] = {}
        self._stats: dict[str, float] = {}
        self._recently_closed_keys: tuple[set[str], set[str]] = (set(), set())
        """Keys of sessions closed since the last two calls of `compute_stats`; their late calls are counted."""

    def open_session(
        self, *, seed: int, sampling: Sampling, order: tuple[int, ...] = (), is_recorded: bool = True
    ) -> Session:
        """Open a session; its key is random and cannot be guessed.

        `order` precedes the call's index in the engine's queue order. Without recording, no turn is kept and every
        prompt is rendered from scratch; used for models that are not trained.
        """
        key = secrets.token_urlsafe(16)
        session = Session(
            self.engine, self.renderer, key=key, seed=seed, order=order, sampling=sampling, is_recorded=is_recorded
        )
        self._sessions[key] = session
        return session

    def close_session(self, key: str) -> tuple[Turn, ...]:
        """End a session and return its turns in order of arrival."""
        session = self._sessions.pop(key)
        self._recently_closed_keys[0].add(key)
        for name in ("num_calls", "num_extended", "num_unextended", "num_repeats", "num_overlong"):
            self.count(name, getattr(session, name))
        if session.num_late_calls:
            self.count("num_late_calls", session.num_late_calls)
        return session.close()

    def find_session(self, key: str) -> Session | None:
        session = self._sessions.get(key)
        if session is None and any(key in keys for keys in self._recently_closed_keys):
            self.count("num_late_calls", 1)
        return session

    def count(self, name: str, number: int) -> None:
        """Add to the counter `rollout/<name>`."""
        self._stats[f"rollout/{name}"] = self._stats.get(f"rollout/{name}", 0.0) + number

    def compute_stats(self) -> dict[str, float]:
        """Counters of the sessions closed since the previous call."""
        stats, self._stats = self._stats, {}
        self._recently_closed_keys = (set(), self._recently_closed_keys[0])
        return stats


Result = TypeVar("Result")

_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tunesmith-tokenizer")
"""Separate from the loop's default executor, whose threads may all be occupied by tools that call the model."""


async def run_tokenizer(renderer: Renderer, work: Callable[[], Result], *, num_characters: int) -> Result:
    """Run `work`, which tokenizes `num_characters`, in a thread if the text is long."""
    if num_characters <= LONG_CHARACTERS or not renderer.is_thread_safe:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_executor, work)
