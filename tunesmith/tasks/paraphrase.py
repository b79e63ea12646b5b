"""More tasks in other words: a model rewrites a field, and everything else of the task stays.

Rewriting costs and is not the same twice, so what the model said is kept in a file, in the order of its answers: a run
that resumes, and the next run with the same file, read it there. Three kinds of rewrite are left out, each with a count
of its own: one that is empty, unchanged or loses a number (refused), one that says what another task or an earlier
rewrite says (repeated), and one that holds words of the instruction (echoed).
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
from tunesmith.storage import save_text
from tunesmith.tasks.operators import normalize, read_text
from tunesmith.types import Task

Fault = Literal["refused", "repeated", "echoed"]
"""Why a rewrite is left out."""
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
PROMPT = (
    "Rewrite the following task in other words. Keep its meaning, every number, every name and every formula. "
    "Answer with the rewritten task alone.\n\n{text}"
)
ECHO_WORDS = 4
"""As many words of the instruction in a row, which the task does not have itself, are an echo of it."""
ANNOUNCEMENT = re.compile(
    r"\b(?:rewritten|paraphrased|reworded|rephrased) (?:task|question|problem|version)\b", re.IGNORECASE
)
"""Words about the rewrite, which are no part of it."""


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
        raise ConfigError(f"paraphrase: the environment has no {api_key_env}")
    api_key = "EMPTY" if api_key_env is None else os.environ[api_key_env]
    cache = _load_cache(Path(cache_path))

    def name_answer(text: str, number: int) -> str:
        return json.dumps([model, temperature, max_tokens, number, text])

    texts = [read_text(task, field) for task in tasks]
    asked = {name_answer(text, number): (text, number) for text in texts for number in range(num_variants)}
    missing = {key: question for key, question in asked.items() if key not in cache}

    def keep(key: str, text: str) -> None:
        cache[key] = text
        _append(Path(cache_path), key, text)

    if missing:
        ask = partial(_ask, model=model, temperature=temperature, max_tokens=max_tokens)
        asyncio.run(_ask_all(missing, ask, keep, base_url=base_url, api_key=api_key, max_concurrency=max_concurrency))
    kept: list[Task] = []
    counts: Counter[Fault] = Counter()
    source_of = {normalize(text): text for text in texts}
    for task, text in zip(tasks, texts, strict=True):
        kept.append(task)
        own: set[str] = set()
        for number in range(num_variants):
            said = cache[name_answer(text, number)]
            fault = find_fault(text, said, own, source_of)
            if fault is None:
                row = {**task.row, field: said.strip()}
                kept.append(replace(task, task_id=f"{task.task_id}/paraphrase-{number}", row=row))
                own.add(normalize(said))
                source_of[normalize(said)] = text
            else:
                counts[fault] += 1
    return kept, {
        "num_asked": float(len(missing)),
        **{f"num_{fault}": float(counts[fault]) for fault in get_args(Fault)},
    }


def find_fault(text: str, said: str, own: Collection[str], source_of: Mapping[str, str]) -> Fault | None:
    """Why a rewrite of `text` is left out; `own` are its earlier rewrites, `source_of` says which task has which text.

    A task that occurs twice gets the same rewrites twice.
    """
    if not is_faithful(text, said):
        return "refused"
    if has_echo(text, said):
        return "echoed"
    key = normalize(said)
    is_repeated = key in own or key == normalize(text) or source_of.get(key, text) != text
    return "repeated" if is_repeated else None


def is_faithful(original: str, rewritten: str) -> bool:
    """It says something else, and has the numbers of the original, each as often."""
    if not rewritten.strip() or rewritten.strip() == original.strip():
        return False
    return sorted(NUMBER.findall(original)) == sorted(NUMBER.findall(rewritten))


def has_echo(original: str, rewritten: str) -> bool:
    """It repeats words of the instruction, or announces itself as a rewrite, where the original does not."""
    echoed = list_phrases(rewritten) & list_phrases(PROMPT.format(text="")) - list_phrases(original)
    is_announced = ANNOUNCEMENT.search(rewritten) is not None and ANNOUNCEMENT.search(original) is None
    return bool(echoed) or is_announced


def list_phrases(text: str) -> set[tuple[str, ...]]:
    """All runs of `ECHO_WORDS` words."""
    words = re.findall(r"\w+", text.casefold())
    return {tuple(words[start : start + ECHO_WORDS]) for start in range(len(words) - ECHO_WORDS + 1)}


async def _ask_all(
    questions: Mapping[str, tuple[str, int]],
    ask: Callable[..., Awaitable[str]],
    keep: Callable[[str, str], None],
    *,
    base_url: str,
    api_key: str,
    max_concurrency: int,
) -> None:
    """Ask so many at once and keep each answer as it comes; the first failure ends what is under way."""
    slots = asyncio.Semaphore(max_concurrency)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=2) as client:

        async def answer(key: str, text: str, number: int) -> None:
            async with slots:
                keep(key, await ask(client, text, seed=number))

        running = [asyncio.create_task(answer(key, *question)) for key, question in questions.items()]
        try:
            await asyncio.gather(*running)
        finally:
            for each in running:
                each.cancel()
            await asyncio.wait(running)


async def _ask(
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
        raise DataError(f"paraphrase: {client.base_url} did not answer in JSON; is it an OpenAI server?") from error
    choices = getattr(completion, "choices", None)
    if not choices:
        raise DataError(f"paraphrase: the answer of {client.base_url} has no choices; is it an OpenAI server?")
    return choices[0].message.content or ""


def _load_cache(path: Path) -> dict[str, str]:
    """What was said before; a last line that a kill cut short is left out and asked for again."""
    if not path.exists():
        return {}
    cache: dict[str, str] = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            key, text = json.loads(line)
        except ValueError as error:
            raise DataError(f"paraphrase: line {number} of {path} is not what was written there: {error}") from error
        cache[key] = text
    if lines[-1]:
        save_text(path, "".join(f"{line}\n" for line in lines[:-1]))
    return cache


def _append(path: Path, key: str, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps([key, text]) + "\n")
