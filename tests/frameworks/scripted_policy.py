"""A policy that replies by a script: the engine runs as it is, and each draw of its sampler is the script's next token.

So logprobs, grammars, stop conditions and the KV cache are real, and the tokens can be trained. What the engine
delivers is listed, to compare it with the recorded turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Hanging, Reply

from tunesmith.engine.batch import sampler
from tunesmith.engine.engine import LocalEngine
from tunesmith.engine.worker import model_runner


@dataclass(slots=True, kw_only=True)
class EngineCall:
    """One request to the engine, and the tokens that it delivered."""

    order: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class ScriptedPolicy:
    """Replies to the calls of each trajectory in their order; the last reply repeats."""

    def __init__(self, replies: Sequence[Reply]) -> None:
        self.calls: list[EngineCall] = []
        self._replies = replies
        self._requests: dict[int, _ScriptedRequest] = {}
        """By the seed of a request."""

    @contextlib.contextmanager
    def replace_draws(self) -> Iterator[None]:
        """Engines of this process draw the script's tokens."""
        originals = LocalEngine.generate, model_runner.sample_tokens, sampler._choose_on_host
        policy, (generate, sample_tokens, _) = self, originals

        async def generate_by_script(engine, prompt_ids, sampling, *, order=(), on_tokens=None):
            return await policy._generate(generate, engine, prompt_ids, sampling, order, on_tokens)

        def sample_by_script(logits_NV, distributions, seeds, positions, **options):
            sampler._choose_on_host = lambda weights_NV, *_: policy._choose(weights_NV, seeds, positions)
            return sample_tokens(logits_NV, distributions, seeds, positions, **options)

        LocalEngine.generate, model_runner.sample_tokens = generate_by_script, sample_by_script
        try:
            yield
        finally:
            LocalEngine.generate, model_runner.sample_tokens, sampler._choose_on_host = originals

    def _choose(
        self, weights_NV: torch.Tensor, seeds: Sequence[int], positions: Sequence[int]
    ) -> sampler.SamplerOutput:
        """The script's token of each row, with its logprob."""
        rows = zip(weights_NV, seeds, positions, strict=True)
        ids = [self._requests[seed].draw(position, weights_V) for weights_V, seed, position in rows]
        totals_N = weights_NV.sum(dim=1, dtype=torch.float64)
        logprobs_N = (weights_NV[range(len(ids)), ids].double() / totals_N).log()
        return sampler.SamplerOutput(ids, logprobs_N.tolist())

    async def _generate(self, generate, engine, prompt_ids, sampling, order, on_tokens) -> Any:
        call = EngineCall(order=order, prompt_ids=tuple(prompt_ids))
        self.calls.append(call)
        reply = self._replies[min(order[-2], len(self._replies) - 1)]
        text = reply.text if isinstance(reply, Hanging) else reply
        self._requests[sampling.seed] = _encode_reply(engine, prompt_ids, text)

        def add_tokens(token_ids, logprobs, *details):
            call.sampled_ids += token_ids
            call.logprobs += logprobs
            if on_tokens is not None:
                on_tokens(token_ids, logprobs, *details)

        completion = await generate(engine, prompt_ids, sampling, order=order, on_tokens=add_tokens)
        if isinstance(reply, Hanging):
            await asyncio.Event().wait()
        return completion


@dataclass(slots=True, kw_only=True)
class _ScriptedRequest:
    """The tokens of one reply."""

    tokenizer: Any
    num_prompt: int
    ids: list[int]

    def draw(self, position: int, weights_V: torch.Tensor) -> int:
        index = min(position - self.num_prompt, len(self.ids) - 1)
        if weights_V[self.ids[index]] == 0:
            self._encode_again(index, weights_V)
        return self.ids[index]

    def _encode_again(self, index: int, weights_V: torch.Tensor) -> None:
        """Spell the rest of the text with a token that the request's grammar allows here."""
        text = self.tokenizer.decode(self.ids[index:-1])
        allowed = {each: self.tokenizer.decode([each]) for each in weights_V.nonzero()[:, 0].tolist()}
        fitting = [each for each, part in allowed.items() if part and text.startswith(part)]
        assert fitting, f"the request's grammar excludes {text!r}"
        longest = max(fitting, key=lambda each: len(allowed[each]))
        rest = self.tokenizer.encode(text[len(allowed[longest]) :], add_special_tokens=False)
        self.ids[index:] = [longest, *rest, self.tokenizer.eos_token_id]


def _encode_reply(engine: LocalEngine, prompt_ids: Sequence[int], text: str) -> _ScriptedRequest:
    """The tokens of a reply after the part that the prompt forces, such as the start of a tool call."""
    tokenizer = engine._tokenizer
    end = tokenizer.decode(prompt_ids[-60:])
    forced = next((size for size in range(len(text), 0, -1) if end.endswith(text[:size])), 0)
    ids = [*tokenizer.encode(text[forced:], add_special_tokens=False), tokenizer.eos_token_id]
    return _ScriptedRequest(tokenizer=tokenizer, num_prompt=len(prompt_ids), ids=ids)
