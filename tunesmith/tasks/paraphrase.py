"""More tasks in other words: a model rewrites a field, and everything else of the task stays.

Rewriting costs and is not the same twice, so what the model said is kept in a file: a run that resumes, and the next
run with the same file, read it there. A rewrite that loses a number of the original is refused and counted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
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
) -> tuple[list[Task], dict[str, float]]:
    """Each task, then its variants with ids `<id>/paraphrase-<number>`."""
    if api_key_env is not None and api_key_env not in os.environ:
        raise ConfigError(f"paraphrase: the environment has no {api_key_env}")
    api_key = "EMPTY" if api_key_env is None else os.environ[api_key_env]
    cache = _load_cache(Path(cache_path))
    kept: list[Task] = []
    num_asked = num_refused = 0
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=2) as client:
        for task in tasks:
            kept.append(task)
            text = read_text(task, field)
            for number in range(num_variants):
                key = json.dumps([model, temperature, max_tokens, number, text])
                if key not in cache:
                    cache[key] = _ask(client, model, text, temperature=temperature, max_tokens=max_tokens, seed=number)
                    _append(Path(cache_path), key, cache[key])
                    num_asked += 1
                if is_faithful(text, cache[key]):
                    row = {**task.row, field: cache[key].strip()}
                    kept.append(replace(task, task_id=f"{task.task_id}/paraphrase-{number}", row=row))
                else:
                    num_refused += 1
    return kept, {"num_asked": float(num_asked), "num_refused": float(num_refused)}


def is_faithful(original: str, rewritten: str) -> bool:
    """It says something else, and has the numbers of the original, each as often."""
    if not rewritten.strip() or rewritten.strip() == original.strip():
        return False
    return sorted(NUMBER.findall(original)) == sorted(NUMBER.findall(rewritten))


def _ask(client: openai.OpenAI, model: str, text: str, *, temperature: float, max_tokens: int, seed: int) -> str:
    try:
        completion = client.chat.completions.create(
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
