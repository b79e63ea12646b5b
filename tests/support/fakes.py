"""Fakes that several tests share."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tunesmith.types import Completion, OnTokens, Sampling, StopReason, TokenDetails


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Writes fail once a file of this process exceeds `num_bytes`, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def build_chat_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of about 400 tokens with the special tokens of several model families."""
    words = "the user asks what is and you may call a function result name arguments calculator tool response assistant"
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    specials = [
        "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
        "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>",
    ]  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=specials
    )
    model.train_from_iterator([words, *words.split()], trainer)
    model.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>", "<tool_call>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>", bos_token="<|begin_of_text|>")
    tokenizer.chat_template = chat_template
    return tokenizer


Script = Callable[[tuple[int, ...], Sampling, tuple[int, ...]], Sequence[int]]
"""Maps prompt ids, sampling and order of a request to the ids that the engine samples."""


class FakeEngine:
    """An engine that samples the tokens of a script, one per iteration of the event loop, and records them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script, *, max_model_len: int = 100_000) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.max_model_len = max_model_len
        self.eos_ids = frozenset({tokenizer.eos_token_id})
        self.policy_version = 0
        self.requests: list[tuple[tuple[int, ...], Sampling, tuple[int, ...]]] = []
        self.ledger: list[tuple[tuple[int, ...], list[int]]] = []
        """Prompt and sampled ids of each request, to compare with the recorded turns."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        order: tuple[int, ...] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        prompt = tuple(prompt_ids)
        self.requests.append((prompt, sampling, order))
        sampled: list[int] = []
        self.ledger.append((prompt, sampled))
        reason: StopReason = "context"
        for token_id in self._script(prompt, sampling, order):
            if len(prompt) + len(sampled) >= self.max_model_len:
                break
            await asyncio.sleep(0)
            sampled.append(token_id)
            if on_tokens is not None:
                entropies = (self.entropy_of(prompt, token_id),)
                details = (TokenDetails(entropies=entropies),) if sampling.return_entropy else ()
                on_tokens([token_id], [self.logprob_of(token_id)], *details)
            reason = self._find_stop(sampled, sampling)
            if reason != "context":
                break
        return Completion(
            sampled_ids=tuple(sampled),
            logprobs=tuple(map(self.logprob_of, sampled)),
            policy_versions=(self.policy_version,) * len(sampled),
            stop_reason=reason,
            entropies=tuple(self.entropy_of(prompt, each) for each in sampled) if sampling.return_entropy else None,
        )

    def _find_stop(self, sampled: list[int], sampling: Sampling) -> StopReason:
        if sampled[-1] == self._tokenizer.eos_token_id and not sampling.ignore_eos:
            return "eos"
        text = self._tokenizer.decode(sampled)
        if sampled[-1] in sampling.stop_token_ids or any(stop in text for stop in sampling.stop):
            return "stop"
        return "length" if len(sampled) >= sampling.max_tokens else "context"

    @staticmethod
    def logprob_of(token_id: int) -> float:
        return -(token_id % 7) / 8 - 0.125

    def entropy_of(self, prompt_ids: tuple[int, ...], token_id: int) -> float:
        """Entropy in nats of the distribution that a token was sampled from; tests replace it."""
        return 0.5

    def pause(self) -> None:
        pass

    def resume(self, policy_version: int) -> None:
        self.policy_version = policy_version

    def compute_stats(self) -> dict[str, float]:
        return {}


def say(tokenizer: PreTrainedTokenizerFast, *replies: str) -> Script:
    """A script that samples the replies in order, each with the end-of-sequence token; the last one repeats."""
    rest = list(replies)

    def script(prompt_ids: tuple[int, ...], sampling: Sampling, order: tuple[int, ...]) -> Sequence[int]:
        reply = rest.pop(0) if len(rest) > 1 else rest[0]
        return [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]

    return script
