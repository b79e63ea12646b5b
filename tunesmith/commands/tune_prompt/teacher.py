"""The chat model that proposes prompts: one request, and its reply as text."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from openai.types.chat import ChatCompletion

from tunesmith.chat.client import create_chat_completion
from tunesmith.commands.candidates.models import LoadedModel
from tunesmith.errors import RolloutError
from tunesmith.rollout.seeds import derive_seed


class Teacher:
    """A model in this process, on a server, or a chat model of the caller."""

    def __init__(self, model: LoadedModel, *, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._numbers = itertools.count()

    async def ask(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> str:
        """The reply's text; `fields` are sampling parameters, which a caller's chat model chooses itself."""
        seed = derive_seed(self._seed, "teacher", next(self._numbers))
        bound = self._model.provider.open(seed=seed, order=())
        try:
            if hasattr(bound.model, "options") and hasattr(bound.model, "client"):
                return read_text(await create_chat_completion(bound.model, messages, **fields))
            reply = await bound.model([dict(message) for message in messages])
            if isinstance(reply, AsyncIterator):
                reply = [chunk async for chunk in reply][-1]  # AgentScope's chunks hold the text so far
            return read_text(reply)
        except Exception as error:  # the caller's model, or a server
            raise RolloutError(f"the model that proposes prompts failed: {type(error).__name__}: {error}") from error
        finally:
            self._model.provider.close(bound)


def read_text(reply: Any) -> str:
    """The text of a completion of OpenAI's client, or of AgentScope's ChatResponse."""
    if isinstance(reply, ChatCompletion):
        return reply.choices[0].message.content or ""
    content = getattr(reply, "content", reply)
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        blocks = [block if isinstance(block, Mapping) else vars(block) for block in content]
        return "".join(str(block.get("text", "")) for block in blocks if block.get("type") == "text")
    raise TypeError(f"it must return a completion of OpenAI's client or a ChatResponse, got {reply!r}")
