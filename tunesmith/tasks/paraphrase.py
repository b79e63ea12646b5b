"""More tasks in other words: a model rewrites a field, and everything else of the task stays.

Rewriting costs and is not the same twice, so what the model said is kept in a file, in the order of its answers: a run
that resumes, and the next run with the same file, read it there. A rewrite that loses a number of the original is
refused and counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import openai
from pydantic import NonNegativeFloat, PositiveInt

from tunesmith.errors import ConfigError, DataError
from tunesmith.storage import save_text
from tunesmith.tasks.operators import read_text
from tunesmith.types import Task

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
PROMPT = (
    "Rewrite the following task in other words. Keep its meaning, every number, every name and every formula. "
    "Answer with the rewritten task alone.\n\n{text}"
)


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
    num_refused = 0
    for task, text in zip(tasks, texts, strict=True):
        kept.append(task)
        for number in range(num_variants):
            said = cache[name_answer(text, number)]
            if is_faithful(text, said):
                row = {**task.row, field: said.strip()}
                kept.append(replace(task, task_id=f"{task.task_id}/paraphrase-{number}", row=row))
            else:
                num_refused += 1
    return kept, {"num_asked": float(len(missing)), "num_refused": float(num_refused)}


def is_faithful(original: str, rewritten: str) -> bool:
    """It says something else, and has the numbers of the original, each as often."""
    if not rewritten.strip() or rewritten.strip() == original.strip():
        return False
    return sorted(NUMBER.findall(original)) == sorted(NUMBER.findall(rewritten))


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
