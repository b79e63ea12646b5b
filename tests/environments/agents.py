"""A model that says what a script says, behind the real recorder and endpoint, and tools for it."""

from __future__ import annotations

from chat_templates import QWEN25
from fakes import FakeEngine, build_chat_tokenizer
from tunesmith.chat.renderer import Renderer
from tunesmith.rollout.service import BoundModel, ModelService
from tunesmith.tools.tool import Tool, ToolInputError, tool
from tunesmith.types import Sampling

TOKENIZER = build_chat_tokenizer(QWEN25)


class ScriptedModel:
    """A bound model whose engine samples the replies in order; token ids of a reply are sampled as they are."""

    def __init__(self, *replies: str | list[int], max_model_len: int = 100_000, max_tokens: int = 1000) -> None:
        rest = list(replies)

        def script(prompt_ids, sampling, order):
            reply = rest.pop(0)
            if isinstance(reply, str):
                reply = [*TOKENIZER.encode(reply, add_special_tokens=False), TOKENIZER.eos_token_id]
            return reply

        self.engine = FakeEngine(TOKENIZER, script, max_model_len=max_model_len)
        sampling = Sampling(max_tokens=max_tokens)
        self.service = ModelService(self.engine, Renderer(TOKENIZER), model_name="m", sampling=sampling)
        self.bound: BoundModel = self.service.open(seed=1)
        self.model = self.bound.model

    def close(self):
        return self.bound.close()


def build_search(log: list[str] | None = None, **settings) -> Tool:
    """A search that finds everything, and refuses the query "bad"."""

    @tool(name="search", **settings)
    async def search(query: str) -> str:
        """Search the encyclopedia."""
        if log is not None:
            log.append(query)
        if query == "bad":
            raise ToolInputError("write another query")
        return f"All about {query}."

    return search
