"""Paraphrase operator: a model rewrites a field to make more tasks; the other fields are copied.

Requests cost money and are not deterministic, so replies are cached in a file in the order of their arrival: a resumed
run, and the next run with the same file, read them from there. Three kinds of rewrite are rejected and counted:
`refused` is empty, unchanged or has other numbers; `repeated` equals another task or an earlier rewrite; `echoed`
contains words of the instruction.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import openai
from pydantic import NonNegativeFloat, PositiveInt

from tunesmith.errors import ConfigError, DataError
from tunesmith.storage import Journal
from tunesmith.tasks.operators import normalize, read_text
from tunesmith.types import Task

Rejection = Literal["refused", "repeated", "echoed"]
"""Why a rewrite is rejected."""
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
PROMPT = (
    "Rewrite the following task in other words. Keep its meaning, every number, every name and every formula. "
    "Answer with the rewritten task alone.\n\n{text}"
)
ECHO_WORDS = 4
"""Length of an n-gram of the instruction that makes a rewrite an echo, unless the task contains it too."""
PREAMBLE = re.compile(
    r"\b(?:rewritten|paraphrased|reworded|rephrased) (?:task|question|problem|version)\b", re.IGNORECASE
)
"""Words that introduce a rewrite, as in "Here is the rewritten task"."""


def paraphrase(
    tasks: Sequence[Task],
    *,
    field: str,
    model: str,
    base_url: str,
    cache_path: str,
    num_variants: PositiveInt = 1,
    api_key_env: str | None = None,
    temperature: NonNegativeFloat = 1.0,
    max_tokens: PositiveInt = 1024,
    max_concurrency: PositiveInt = 8,
) -> tuple[list[Task], dict[str, float]]:
    """Each task, then its variants with ids `<id>/paraphrase-<number>`; at most `max_concurrency` requests at once."""
    if api_key_env is not None and api_key_env not in os.environ:
        raise ConfigError(f"paraphrase: the environment variable {api_key_env} (api_key_env) is not set")
    api_key = "EMPTY" if api_key_env is None else os.environ[api_key_env]
    journal = Journal(Path(cache_path))
    cache = _read_replies(journal)

    def build_key(text: str, number: int) -> str:
        return json.dumps([model, temperature, max_tokens, number, text])

    texts = [read_text(task, field) for task in tasks]
    requests = {build_key(text, number): (text, number) for text in texts for number in range(num_variants)}
    missing = {key: request for key, request in requests.items() if key not in cache}

    def save_reply(key: str, reply: str) -> None:
        cache[key] = reply
        journal.append([key, reply])

    if missing:
        send = partial(_send_request, model=model, temperature=temperature, max_tokens=max_tokens)
        asyncio.run(
            _send_all(missing, send, save_reply, base_url=base_url, api_key=api_key, max_concurrency=max_concurrency)
        )
    kept: list[Task] = []
    counts: Counter[Rejection] = Counter()
    source_of = {normalize(text): text for text in texts}
    for task, text in zip(tasks, texts, strict=True):
        kept.append(task)
        accepted: set[str] = set()
        for number in range(num_variants):
            rewrite = cache[build_key(text, number)]
            rejection = find_rejection(text, rewrite, accepted, source_of)
            if rejection is None:
                row = {**task.row, field: rewrite.strip()}
                kept.append(replace(task, task_id=f"{task.task_id}/paraphrase-{number}", row=row))
                accepted.add(normalize(rewrite))
                source_of[normalize(rewrite)] = text
            else:
                counts[rejection] += 1
    return kept, {
        "num_asked": float(len(missing)),
        **{f"num_{rejection}": float(counts[rejection]) for rejection in get_args(Rejection)},
    }


def find_rejection(
    text: str, rewrite: str, accepted: Collection[str], source_of: Mapping[str, str]
) -> Rejection | None:
    """Why a rewrite of `text` is rejected, or None.

    `accepted` are the normalized earlier rewrites of the task; `source_of` maps each normalized text and rewrite to the
    text that it belongs to. Duplicate tasks have the same text and get the same rewrites.
    """
    if not is_faithful(text, rewrite):
        return "refused"
    if has_echo(text, rewrite):
        return "echoed"
    key = normalize(rewrite)
    is_repeated = key in accepted or key == normalize(text) or source_of.get(key, text) != text
    return "repeated" if is_repeated else None


def is_faithful(original: str, rewritten: str) -> bool:
    """Whether the text differs from the original and has the same numbers, each as often."""
    if not rewritten.strip() or rewritten.strip() == original.strip():
        return False
    return sorted(NUMBER.findall(original)) == sorted(NUMBER.findall(rewritten))


def has_echo(original: str, rewritten: str) -> bool:
    """Whether it contains words of the instruction or a preamble that the original does not contain."""
    echoed = list_ngrams(rewritten) & list_ngrams(PROMPT.format(text="")) - list_ngrams(original)
    has_preamble = PREAMBLE.search(rewritten) is not None and PREAMBLE.search(original) is None
    return bool(echoed) or has_preamble


def list_ngrams(text: str) -> set[tuple[str, ...]]:
    """All n-grams of `ECHO_WORDS` words."""
    words = re.findall(r"\w+", text.casefold())
    return {tuple(words[start : start + ECHO_WORDS]) for start in range(len(words) - ECHO_WORDS + 1)}


async def _send_all(
    requests: Mapping[str, tuple[str, int]],
    send: Callable[..., Awaitable[str]],
    save_reply: Callable[[str, str], None],
    *,
    base_url: str,
    api_key: str,
    max_concurrency: int,
) -> None:
    """Send at most `max_concurrency` requests at once and save each reply on arrival; the first failure cancels all."""
    semaphore = asyncio.Semaphore(max_concurrency)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=2) as client:

        async def run(key: str, text: str, number: int) -> None:
            async with semaphore:
                save_reply(key, await send(client, text, seed=number))

        running = [asyncio.create_task(run(key, *request)) for key, request in requests.items()]
        try:
            await asyncio.gather(*running)
        finally:
            for each in running:
                each.cancel()
            await asyncio.wait(running)


async def _send_request(
    client: openai.AsyncOpenAI, text: str, *, model: str, temperature: float, max_tokens: int, seed: int
) -> str:
    try:
        completion = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT.format(text=text)}],
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
        )
    except openai.OpenAIError as error:
        raise DataError(f"paraphrase: the model {model!r} did not answer: {error}") from error
    except ValueError as error:
        raise DataError(f"paraphrase: the reply of {client.base_url} is not JSON; is it an OpenAI server?") from error
    choices = getattr(completion, "choices", None)
    if not choices:
        raise DataError(f"paraphrase: the reply of {client.base_url} has no choices; is it an OpenAI server?")
    return choices[0].message.content or ""


def _read_replies(journal: Journal) -> dict[str, str]:
    """The cached replies by their request."""
    try:
        return dict(journal.rows)
    except (TypeError, ValueError) as error:
        raise DataError(f"paraphrase: a line of {journal.path} is not a cached reply: {error}") from error
