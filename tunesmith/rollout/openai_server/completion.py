"""Creates the response of one admitted request, complete or streamed: of a chat, or of prompts as text.

Both use the same reply parser, so the deltas of a stream concatenate to the message of a complete response. The choices
of a request are sampled concurrently. The session records each as a turn, and stores the parsed reply of a chat, so
that later requests can extend the turn. Each prompt of a text request is a separate call of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.types import Send

from tunesmith.chat.messages import Message
from tunesmith.chat.parsers.incremental import Delta, IncrementalParser, join_deltas
from tunesmith.chat.parsers.reply import ReplyParser
from tunesmith.chat.renderer import Renderer
from tunesmith.errors import EngineError
from tunesmith.rollout.cancellation import cancel_all, gather_all
from tunesmith.rollout.openai_server.request import ChatRequest, CompletionRequest, TextRequest
from tunesmith.rollout.openai_server.response import (
    END_OF_STREAM,
    Event,
    Events,
    TokenLogprobs,
    build_delta,
    build_error,
    build_logprobs,
    build_message,
    build_text_logprobs,
    build_usage,
    encode_event,
    list_tokens,
)
from tunesmith.rollout.recording.recorder import Session, SessionCall, SessionClosedError
from tunesmith.types import Completion, OnTokens, TokenDetails

Request = TypeVar("Request", bound=CompletionRequest)


class PendingCompletion(ABC, Generic[Request]):
    """An admitted request: samples its choices and builds its response."""

    id_prefix: str
    body_object: str
    chunk_object: str
    """The `object` fields of a complete response and of stream chunks."""
    prefix_ids: tuple[int, ...] = ()
    """The start of each reply that is not sampled."""
    open_events: Callable[[], Events] | None = None
    """Opens the events of an API whose responses have another form."""

    def __init__(
        self, session: Session, renderer: Renderer, request: Request, calls: Sequence[SessionCall], *, model_name: str
    ) -> None:
        """`calls`: one for each prompt."""
        self.session = session
        self.renderer = renderer
        self.request = request
        self.calls = calls
        self.request_id = f"{session.key[:8]}-{calls[0].index}"
        self.model_name = model_name
        self.sampling = request.sampling

    @property
    def num_choices(self) -> int:
        return len(self.calls) * self.request.num_choices

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(call.prompt_ids) + len(self.prefix_ids) for call in self.calls)

    def start_body(self, kind: str) -> dict[str, Any]:
        """The fields that a complete response and each chunk begin with."""
        created = int(time.time())
        return {
            "id": f"{self.id_prefix}-{self.request_id}",
            "object": kind,
            "created": created,
            "model": self.model_name,
        }

    def find_call(self, choice: int) -> SessionCall:
        """The call that a choice belongs to; choices of one prompt are consecutive."""
        return self.calls[choice // self.request.num_choices]

    async def sample_choice(self, choice: int, on_tokens: OnTokens | None = None) -> Completion:
        return await self.session.generate(
            self.find_call(choice),
            choice % self.request.num_choices,
            self.sampling,
            seed=self.request.seed,
            prefix_ids=self.prefix_ids,
            on_tokens=on_tokens,
        )

    def build_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        body = self.start_body(self.body_object)
        body["choices"] = [self.build_choice(index, completion) for index, completion in enumerate(completions)]
        body["usage"] = build_usage(self.num_prompt_tokens, completions)
        if self.request.has_token_ids:
            self.add_prompt_ids(body)
        return body

    def build_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        parser = self.build_parser()
        hidden = self.request.sampling.stop_token_ids
        message = parser.parse(self.renderer.decode(completion.sampled_ids, extra_hidden_ids=hidden))
        self.record_reply(index, message, parser.stop_string)
        tokens: list[TokenLogprobs] = []
        if self.has_token_fields:
            tokens = list_tokens(completion.sampled_ids, completion.logprobs, completion.top_logprobs)
        choice = self.build_part(index, self.build_message(message), tokens, completion.entropies or ())
        return choice | build_end(completion, message, parser)

    def build_part(
        self, index: int, content: Mapping[str, Any], tokens: Sequence[TokenLogprobs], entropies: Sequence[float]
    ) -> dict[str, Any]:
        """A choice of a complete response, or of one chunk, before its end."""
        choice: dict[str, Any] = {"index": index, **content, "finish_reason": None, "logprobs": None}
        if self.request.has_logprobs and tokens:
            choice["logprobs"] = self.build_logprobs(tokens)
        if self.request.has_token_ids:
            choice["token_ids"] = [token_id for token_id, *_ in tokens]
        if self.request.sampling.return_entropy:
            choice["entropies"] = list(entropies)
        return choice

    @property
    def has_token_fields(self) -> bool:
        return self.request.has_logprobs or self.request.has_token_ids

    def add_prompt_ids(self, body: dict[str, Any]) -> None:
        """Add the prompts' ids to a complete response, or to a choice's first chunk."""
        for choice in body["choices"]:
            choice["prompt_token_ids"] = list(self.find_call(choice["index"]).prompt_ids)

    def record_reply(self, index: int, message: Message, stop_string: str | None) -> None:
        """Store the reply of a choice for later calls; `stop_string` ended its text."""

    @abstractmethod
    def build_parser(self) -> IncrementalParser: ...

    @abstractmethod
    def build_message(self, message: Message) -> dict[str, Any]:
        """The reply as a field of a complete choice."""

    @abstractmethod
    def build_delta(self, delta: Delta, *, num_calls: int, is_first: bool) -> dict[str, Any]:
        """A part of the reply as a field of a chunk's choice; `num_calls`: of tool calls in earlier chunks."""

    @abstractmethod
    def build_logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]: ...


def build_end(completion: Completion, message: Message, parser: IncrementalParser) -> dict[str, Any]:
    """Fields of the end of a choice."""
    reason = "length"
    if completion.stop_reason in ("eos", "stop") or parser.stop_string is not None:
        reason = "tool_calls" if message.tool_calls else "stop"
    return {"finish_reason": reason} | ({} if parser.stop_string is None else {"stop_reason": parser.stop_string})


OpenEvents = Callable[["PendingChatCompletion"], Events]


class PendingChatCompletion(PendingCompletion[ChatRequest]):
    """An admitted chat request."""

    id_prefix, body_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        session: Session,
        renderer: Renderer,
        request: ChatRequest,
        call: SessionCall,
        *,
        model_name: str,
        open_events: OpenEvents | None = None,
    ) -> None:
        super().__init__(session, renderer, request, [call], model_name=model_name)
        self.call = call
        self.open_events = None if open_events is None else partial(open_events, self)
        self._prefix_text = ""
        if request.tool_choice == "required":
            self._prefix_text, self.prefix_ids = renderer.build_call_prefix(
                request.called_tool, call.prompt_ids, has_grammar=bool(request.sampling.distribution.grammar)
            )
        self._is_single_call = request.is_single_call and request.has_callable_tools
        if self._is_single_call and not request.sampling.distribution.min_tokens:  # sampling stops after the call
            self.sampling = renderer.limit_to_one_call(request.sampling)

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.call.prompt_ids + self.prefix_ids

    def build_parser(self) -> IncrementalParser:
        return self.renderer.build_parser(
            self.call.prompt_ids,
            new_call_id=self.session.build_call_id,
            has_tools=self.request.has_callable_tools,
            has_reasoning=self.request.has_reasoning_field,
            tools=self.request.tools,
            is_single_call=self._is_single_call,
            stop=self.request.sampling.stop,
            keeps_stop=self.request.keeps_stop,
            prefix=self._prefix_text,
        )

    def record_reply(self, index: int, message: Message, stop_string: str | None) -> None:
        if self.request.has_callable_tools:
            self.renderer.watch_calls(message, self.request.tools)
        cut_stop = "" if self.request.keeps_stop else stop_string or ""
        self.session.record_reply(self.call, index, message, cut_stop=cut_stop)

    def build_message(self, message: Message) -> dict[str, Any]:
        return {"message": build_message(message)}

    def build_delta(self, delta: Delta, *, num_calls: int, is_first: bool) -> dict[str, Any]:
        return {"delta": build_delta(delta, num_calls=num_calls, is_first=is_first)}

    def build_logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return build_logprobs(tokens, self.renderer)

    def add_prompt_ids(self, body: dict[str, Any]) -> None:
        body["prompt_token_ids"] = list(self.prompt_ids)

    def build_body(self, completions: Sequence[Completion]) -> dict[str, Any]:
        body = super().build_body(completions)
        if self.open_events is None:
            return body
        events = self.open_events()
        choices = [{**choice, "delta": choice["message"]} for choice in body["choices"]]
        events.translate(body | {"choices": choices})
        events.finish()
        return events.build_body()


class PendingTextCompletion(PendingCompletion[TextRequest]):
    """An admitted completion request: rendered prompts, and text that is not parsed for reasoning or calls."""

    id_prefix, body_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def build_parser(self) -> ReplyParser:
        """A parser that only truncates the text at stop strings."""
        return ReplyParser(new_call_id=str, has_reasoning=False, has_tool_calls=False, stop=self.request.sampling.stop)

    def build_message(self, message: Message) -> dict[str, Any]:
        return {"text": message.content}

    def build_delta(self, delta: Delta, *, num_calls: int, is_first: bool) -> dict[str, Any]:
        return {"text": delta.content}

    def build_logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        has_top = self.request.sampling.top_logprobs > 0
        return build_text_logprobs(tokens, self.renderer, has_top=has_top)


async def create_completion(pending: PendingCompletion[Any]) -> dict[str, Any]:
    """Sample all choices and return the complete response body."""
    if pending.num_choices == 1:  # without a task of its own
        completions = [await pending.sample_choice(0)]
    else:
        completions = await gather_all(map(pending.sample_choice, range(pending.num_choices)))
    return pending.build_body(completions)


class ChoiceStream:
    """Turns the tokens of one choice into chunks."""

    def __init__(self, pending: PendingCompletion[Any], index: int) -> None:
        hidden = pending.request.sampling.stop_token_ids
        self._pending = pending
        self._index = index
        self._parser = pending.build_parser()
        self._detokenizer = pending.renderer.build_incremental_detokenizer(extra_hidden_ids=hidden)
        self._deltas: list[Delta] = []
        """One for each chunk."""
        self._num_calls = 0
        self._num_characters = 0
        """Of the tokens whose `text_offset` has been sent."""
        self._tokens: list[TokenLogprobs] = []
        self._entropies: list[float] = []
        """Both since the last chunk."""

    def add_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[float], details: TokenDetails | None = None
    ) -> dict[str, Any] | None:
        """The next chunk, if these tokens complete one."""
        details = details or TokenDetails()
        if self._pending.has_token_fields:
            self._tokens += list_tokens(token_ids, logprobs, details.top_logprobs)
        self._entropies += details.entropies or ()
        text = "".join(map(self._detokenizer.feed, token_ids))
        delta = self._parser.feed(text) if text else Delta()
        return self._build_chunk(delta) if delta or not self._deltas else None

    def finish(self, completion: Completion) -> list[dict[str, Any]]:
        """The last chunks: held-back text, then the finish reason."""
        deltas = [self._parser.feed(self._detokenizer.finish()), self._parser.finish()]
        chunks = [self._build_chunk(delta) for delta in deltas if delta]
        message = join_deltas(self._deltas)
        self._pending.record_reply(self._index, message, self._parser.stop_string)
        last = self._build_chunk(Delta())
        last["choices"][0] |= build_end(completion, message, self._parser)
        return [*chunks, last]

    def _build_chunk(self, delta: Delta) -> dict[str, Any]:
        pending, is_first = self._pending, not self._deltas
        content = pending.build_delta(delta, num_calls=self._num_calls, is_first=is_first)
        chunk = pending.start_body(pending.chunk_object)
        choice = pending.build_part(self._index, content, self._tokens, self._entropies)
        if (logprobs := choice["logprobs"]) and "text_offset" in logprobs:
            logprobs["text_offset"] = [self._num_characters + each for each in logprobs["text_offset"]]
            self._num_characters += sum(map(len, logprobs["tokens"]))
        chunk["choices"] = [choice]
        if is_first and pending.request.has_token_ids:
            pending.add_prompt_ids(chunk)
        self._deltas.append(delta)
        self._num_calls += len(delta.tool_calls)
        self._tokens, self._entropies = [], []
        return chunk


StreamEvent = tuple[int, tuple[Sequence[int], Sequence[float], TokenDetails | None] | None]
"""Index of a choice, and its next tokens with their logprobs and details; None at the end of the choice."""


async def iterate_chunks(pending: PendingCompletion[Any]) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of all choices while they are sampled; closing the generator cancels them."""
    events: asyncio.Queue[StreamEvent] = asyncio.Queue()
    choices = [ChoiceStream(pending, index) for index in range(pending.num_choices)]
    tasks = [_start_choice(pending, index, events) for index in range(len(choices))]
    num_open = len(tasks)
    try:
        while num_open:
            index, tokens = await events.get()
            if tokens is not None:
                chunk = choices[index].add_tokens(*tokens)
                chunks = [] if chunk is None else [chunk]
            else:
                chunks = choices[index].finish(tasks[index].result())
                num_open -= 1
            for chunk in chunks:
                yield chunk
        if pending.request.has_stream_usage:
            usage = build_usage(pending.num_prompt_tokens, [task.result() for task in tasks])
            yield pending.start_body(pending.chunk_object) | {"choices": [], "usage": usage}
    finally:
        await cancel_all(tasks)


async def iterate_events(pending: PendingCompletion[Any]) -> AsyncGenerator[Event, None]:
    """The events of a stream: the chunks, or what the events of another API make of them."""
    events = None if pending.open_events is None else pending.open_events()
    is_started = False
    try:
        async with contextlib.aclosing(iterate_chunks(pending)) as chunks:
            async for chunk in chunks:
                for event in (chunk,) if events is None else events.translate(chunk):
                    is_started = True
                    yield event
    except (EngineError, SessionClosedError) as error:
        if not is_started:
            raise
        message = f"{type(error).__name__}: {error}"
        yield build_error(message, status=500) if events is None else events.fail(message)
    else:
        for event in () if events is None else events.finish():
            yield event


async def stream_completion(pending: PendingCompletion[Any], send: Send) -> None:
    """Send the choices as server-sent events while they are sampled.

    Nothing is sent before the first token, so that a request that fails at once gets an error status.
    """
    is_started = False
    async with contextlib.aclosing(iterate_events(pending)) as events:
        async for event in events:
            if not is_started:
                is_started = True
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": encode_event(event), "more_body": True})
    end = END_OF_STREAM if pending.open_events is None else b""
    await send({"type": "http.response.body", "body": end, "more_body": False})


def _start_choice(
    pending: PendingCompletion[Any], index: int, events: asyncio.Queue[StreamEvent]
) -> asyncio.Future[Completion]:
    def add_tokens(token_ids: Sequence[int], logprobs: Sequence[float], details: TokenDetails | None = None) -> None:
        events.put_nowait((index, (token_ids, logprobs, details)))

    task = asyncio.ensure_future(pending.sample_choice(index, add_tokens))
    task.add_done_callback(lambda _: events.put_nowait((index, None)))
    return task
