"""Operators on tasks, applied once before a run: they filter, score or reorder tasks and return metrics.

An operator is a function `(tasks, **args) -> (tasks, metrics)`. A task keeps its index and id, so that it can be found
in the data set; an operator adds fields to a row but never overwrites one.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, get_args

import openai
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from tunesmith.arguments import read_api_key
from tunesmith.data_juicer import apply_recipe
from tunesmith.errors import DataError
from tunesmith.storage import Journal
from tunesmith.tasks.contamination import iter_ngrams, split_words
from tunesmith.tasks.load import read_field
from tunesmith.types import Task

ChangedTasks = tuple[list[Task], dict[str, float]]
"""Tasks, and metrics."""
TaskOperator = Callable[..., ChangedTasks]

Fields = Annotated[list[str], Field(min_length=1)]
Weights = Annotated[dict[str, float], Field(min_length=1)]

TOKEN = re.compile(r"(?:(?<![\w.])\.(?=\d))?\w+(?:[.,]\w+)*|(?<=\b\w)'+|'+(?=\()|[^\w\s.,;:?'\"]")
"""Tokens that distinguish two tasks: words, numbers with decimals, primes (f'(x), y'), signs such as + - * / ( )."""
NGRAM_CHARS = 10
NGRAM_WORDS = 5
"""Lengths of the n-grams whose repetition is measured."""


def deduplicate(tasks: Sequence[Task], *, fields: Fields) -> ChangedTasks:
    """Keep the first of tasks whose fields are equal up to spacing, case and sentence punctuation."""
    first: dict[tuple[str, ...], Task] = {}
    for task in tasks:
        first.setdefault(tuple(normalize(read_text(task, field)) for field in fields), task)
    return list(first.values()), {"num_removed": float(len(tasks) - len(first))}


def normalize(text: str) -> str:
    """The text without case, extra spacing and sentence punctuation."""
    return " ".join(TOKEN.findall(text.casefold()))


def length_filter(
    tasks: Sequence[Task], *, field: str, min_chars: NonNegativeInt = 0, max_chars: PositiveInt | None = None
) -> ChangedTasks:
    """Keep tasks whose field has between `min_chars` and `max_chars` characters."""
    longest = math.inf if max_chars is None else max_chars
    kept = [task for task in tasks if min_chars <= len(read_text(task, field)) <= longest]
    return kept, {"num_removed": float(len(tasks) - len(kept))}


def score_quality(tasks: Sequence[Task], *, field: str, to: str = "quality_score") -> ChangedTasks:
    """Add a score from 0 to 1: the mean share of alphanumeric characters and of unique character and word n-grams."""
    return _add_scores(tasks, to, [compute_quality(read_text(task, field)) for task in tasks])


def score_difficulty(tasks: Sequence[Task], *, feature_keys: Fields, to: str = "difficulty_score") -> ChangedTasks:
    """Add one minus the mean pass rate of the reference models."""
    scores = [1.0 - fmean(read_pass_rate(task, key) for key in feature_keys) for task in tasks]
    return _add_scores(tasks, to, scores)


def order_by_priority(tasks: Sequence[Task], *, weights: Weights, top_k: PositiveInt | None = None) -> ChangedTasks:
    """Sort by a weighted sum of numeric fields, highest first, stable; keep the first `top_k`."""

    def compute_priority(task: Task) -> float:
        return sum(weight * read_number(task, field) for field, weight in weights.items())

    kept = sorted(tasks, key=compute_priority, reverse=True)[:top_k]
    return kept, {"num_removed": float(len(tasks) - len(kept))}


def data_juicer(
    tasks: Sequence[Task],
    *,
    process: Annotated[list[dict[str, Any]], Field(min_length=1)],
    field: str = "text",
    num_proc: PositiveInt = 1,
    python: str | None = None,
) -> ChangedTasks:
    """Apply operators of Data-Juicer, written as in its files: `[{name: arguments}, ...]`.

    They filter tasks, change their rows, and add the numbers that they compute as fields. `field` has the text of
    operators that name none; `python` is an interpreter with Data-Juicer, by default this one.
    """
    rows = [task.row for task in tasks]
    kept = apply_recipe(rows, process, text_key=field, num_proc=num_proc, python=python)
    if taken := {name for each in kept for name in each.stats if name in rows[each.index]}:
        raise DataError(f"the tasks already have the fields {', '.join(sorted(taken))}, which Data-Juicer computes")
    changed = [replace(tasks[each.index], row={**each.row, **each.stats}) for each in kept]
    return changed, {
        "num_removed": float(len(tasks) - len(kept)),
        "num_failed": float(sum(each.num_failed for each in kept)),
    }


def compute_quality(text: str) -> float:
    """Mean of three shares, each 1 for clean prose; 0 for text without words."""
    words = split_words(text)
    if not words:
        return 0.0
    char_ngrams = [text[start : start + NGRAM_CHARS] for start in range(max(len(text) - NGRAM_CHARS + 1, 1))]
    word_ngrams = list(iter_ngrams(words, min(NGRAM_WORDS, len(words))))
    alphanumeric = fmean(character.isalnum() for character in text if not character.isspace())
    return fmean([alphanumeric, compute_unique_share(char_ngrams), compute_unique_share(word_ngrams)])


def compute_unique_share(items: Sequence[Any]) -> float:
    """Share of the items that occur exactly once."""
    counts = Counter(items)
    return sum(count for count in counts.values() if count == 1) / len(items)


def read_text(task: Task, field: str) -> str:
    value = read_field(task.row, field, where=f"task {task.task_id}")
    return value if isinstance(value, str) else str(value)


def read_number(task: Task, field: str) -> float:
    value = read_field(task.row, field, where=f"task {task.task_id}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"task {task.task_id} has {field}={value!r}, which is not a finite number")
    return float(value)


def read_pass_rate(task: Task, field: str) -> float:
    value = read_number(task, field)
    if not 0 <= value <= 1:
        raise DataError(f"task {task.task_id} has {field}={value!r}, which is not a pass rate from 0 to 1")
    return value


def _add_scores(tasks: Sequence[Task], to: str, scores: Sequence[float]) -> ChangedTasks:
    if any(to in task.row for task in tasks):
        raise DataError(f"the tasks already have a field {to!r}; choose another name with `to`")
    scored = [replace(task, row={**task.row, to: score}) for task, score in zip(tasks, scores, strict=True)]
    return scored, {"mean": fmean(scores), "min": min(scores), "max": max(scores)}


Rejection = Literal["refused", "repeated", "echoed"]
"""Why a rewrite is rejected."""
NUMBER = re.compile(r"(?:(?<![\w.])\.)?\d+(?:[.,]\d+)*")
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
) -> ChangedTasks:
    """Each task, then its variants with ids `<id>/paraphrase-<number>`; at most `max_concurrency` requests at once.

    A model rewrites `field`; the other fields are copied. Requests cost money and are not deterministic, so replies are
    cached in a file, from which a resumed run and the next run with the same file read them. Of runs that share it at
    once, all use the first reply to a request. Rejected are counted: `refused` is empty, cut off, unchanged or has
    other numbers; `repeated` equals another task or an earlier rewrite; `echoed` contains words of the instruction.
    """
    api_key = read_api_key(api_key_env, knob="paraphrase: api_key_env") or "EMPTY"
    journal = Journal(Path(cache_path))
    cache = _read_replies(journal)

    def build_key(text: str, number: int) -> str:
        return json.dumps([model, temperature, max_tokens, number, text])

    texts = [read_text(task, field) for task in tasks]
    requests = {build_key(text, number): (text, number) for text in texts for number in range(num_variants)}
    missing = {key: request for key, request in requests.items() if key not in cache}

    if missing:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=2)
        sampling = {"model": model, "temperature": temperature, "max_tokens": max_tokens}
        asyncio.run(_send_all(missing, client, journal, max_concurrency, sampling))
        cache = _read_replies(Journal(journal.path))  # another run may have saved a reply to the same request before
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
    return set(iter_ngrams(split_words(text), ECHO_WORDS))


async def _send_all(
    requests: Mapping[str, tuple[str, int]],
    client: openai.AsyncOpenAI,
    journal: Journal,
    max_concurrency: int,
    sampling: Mapping[str, Any],
) -> None:
    """Send at most `max_concurrency` requests at once and save each reply on arrival; the first failure cancels all."""
    semaphore = asyncio.Semaphore(max_concurrency)

    async def run(key: str, text: str, number: int) -> None:
        async with semaphore:
            journal.append([key, await _send_request(client, text, **sampling, seed=number)])

    try:
        async with client, asyncio.TaskGroup() as running:
            for key, request in requests.items():
                running.create_task(run(key, *request))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _send_request(client: openai.AsyncOpenAI, text: str, *, model: str, **sampling: Any) -> str:
    messages: Any = [{"role": "user", "content": PROMPT.format(text=text)}]
    try:
        completion = await client.chat.completions.create(model=model, messages=messages, **sampling)
    except openai.OpenAIError as error:
        raise DataError(f"paraphrase: the model {model!r} did not answer: {error}") from error
    except ValueError as error:
        raise DataError(f"paraphrase: the reply of {client.base_url} is not JSON; is it an OpenAI server?") from error
    choices = getattr(completion, "choices", None)
    if not choices:
        raise DataError(f"paraphrase: the reply of {client.base_url} has no choices; is it an OpenAI server?")
    is_truncated = choices[0].finish_reason == "length"  # such a rewrite may lack the end of the task
    return "" if is_truncated else choices[0].message.content or ""


def _read_replies(journal: Journal) -> dict[str, str]:
    """The first reply to each request."""
    try:
        return dict(reversed(journal.rows))
    except (TypeError, ValueError) as error:
        raise DataError(f"paraphrase: a line of {journal.path} is not a cached reply: {error}") from error
