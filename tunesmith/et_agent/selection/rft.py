"""Filter of trajectories for rejection fine-tuning, as a stage: transcripts in, conversations for `sft` out.

A trajectory is kept if it is right, well-formed and has no failed call; equal texts of a question are kept once, and a
question keeps at most `max_per_question`. Conversations have results of tools as context, which is not trained. Every
removed trajectory is counted under the first reason that applies.
"""

from __future__ import annotations

import importlib.util
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.commands.eval.comparison import format_table
from tunesmith.commands.stage import TABLES, ChooseModel, StageResult, check_rows, drop_pending_tools
from tunesmith.config import RftFilterSection
from tunesmith.environments.environment import Environment
from tunesmith.environments.protocols import build_conversation
from tunesmith.environments.transcript import Transcript, find_format_error, read_transcript
from tunesmith.errors import ConfigError, DataError
from tunesmith.runs.load_function import load_environment
from tunesmith.storage import save_json
from tunesmith.tasks.load import Row, check_finite, read_field, read_rows, write_rows

Floats = NDArray[np.float64]
WORD = re.compile(r"\w+|[^\w\s]")
NUM_BUCKETS = 4096
"""Dimensions that word pairs are hashed to."""
BATCH_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRow:
    """A trajectory of a question with its score; `row` has the other fields of its line."""

    question_id: Any
    transcript: Transcript
    correctness: float
    row: Mapping[str, Any]

    @property
    def pattern(self) -> tuple[str, ...]:
        """Names of the tools that were called, in order."""
        return tuple(each.tool for each in self.transcript.calls)


def measure_diversity(rows: Sequence[TrajectoryRow], *, embedding_model: str | None = None) -> dict[str, float | None]:
    """Measures by name; None if no question has two trajectories, or there are fewer than two in all.

    The spread of texts is the mean cosine distance of pairs: of vectors of a sentence-transformers model, or of counts
    of word pairs. Each has its own name, because their values cannot be compared. Axes: N texts, D dimensions.
    """
    by_question: defaultdict[Any, list[TrajectoryRow]] = defaultdict(list)
    for row in rows:
        by_question[row.question_id].append(row)
    groups = list(by_question.values())
    pairs = [group for group in groups if len(group) > 1]
    name = "lexical_spread" if embedding_model is None else "embedding_spread"
    inside, overall = measure_text_spreads(
        [[row.transcript.text for row in group] for group in groups], embedding_model
    )
    return {
        "trajectories": float(len(rows)),
        "questions": float(len(groups)),
        "trajectories_per_question": average([float(len(group)) for group in groups]),
        "tool_patterns_per_question": average([float(len({row.pattern for row in group})) for group in groups]),
        "tool_calls": average([float(len(row.pattern)) for row in rows]),
        "std_correctness_in_question": average([pstdev(row.correctness for row in group) for group in pairs]),
        "std_tool_calls_in_question": average([pstdev(len(row.pattern) for row in group) for group in pairs]),
        f"{name}_in_question": inside,
        name: overall,
    }


def measure_text_spreads(
    groups: Sequence[Sequence[str]], embedding_model: str | None
) -> tuple[float | None, float | None]:
    """The mean spread of the texts of one question, and the spread of all texts; None without two of them."""
    embedded_ND = None
    if embedding_model is not None:
        embedded_ND = embed_texts([text for group in groups for text in group], embedding_model)
    spreads, sums, start = [], [], 0
    for group in groups:
        end = start + len(group)
        units = normalize(count_word_pairs(group) if embedded_ND is None else embedded_ND[start:end])
        sums.append((units.sum(axis=0), float((units * units).sum()), len(group)))
        spreads.append(compute_spread(*sums[-1]))
        start = end
    known = [spread for spread in spreads if spread is not None]
    total_D = np.sum([each for each, _, _ in sums], axis=0)
    return average(known), compute_spread(total_D, sum(each for _, each, _ in sums), sum(each for _, _, each in sums))


def average(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def normalize(vectors_ND: Floats) -> Floats:
    """Vectors of length 1; zero vectors stay."""
    norms_N1 = np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    return np.asarray(vectors_ND / np.where(norms_N1 > 0, norms_N1, 1.0))


def compute_spread(total_D: Floats, squares: float, count: int) -> float | None:
    """Mean cosine distance over all pairs of `count` unit vectors with this sum and this sum of squares; None without a
    pair."""
    if count < 2:
        return None
    return 1.0 - (float(total_D @ total_D) - squares) / (count * (count - 1))


def count_word_pairs(texts: Sequence[str]) -> Floats:
    """Counts of pairs of neighboring words, in lower case, hashed to a fixed number of dimensions."""
    vectors_ND = np.zeros((len(texts), NUM_BUCKETS))
    for number, text in enumerate(texts):
        words = ["", *WORD.findall(text.lower()), ""]
        for one, other in pairwise(words):
            vectors_ND[number, zlib.crc32(f"{one} {other}".encode()) % NUM_BUCKETS] += 1
    return vectors_ND


def check_embedding_model(name: str | None) -> None:
    """Raise when an embedding model is wanted and its package is not installed."""
    if name is not None and importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(
            f"embedding_model={name!r} needs sentence-transformers: pip install 'tunesmith[embeddings]', or leave "
            "embedding_model out to report the spread of word pairs"
        )


def embed_texts(texts: Sequence[str], name: str) -> Floats:
    from sentence_transformers import SentenceTransformer  # optional, and slow to import

    model = SentenceTransformer(name)
    return np.asarray(model.encode(list(texts), batch_size=BATCH_SIZE, show_progress_bar=False), dtype=np.float64)


def format_diversity(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> list[list[str]]:
    def show(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:.0f}" if value == math.floor(value) and value >= 10 else f"{value:.4g}"

    return [[name.replace("_", " "), show(before[name]), show(after[name])] for name in before]


CONVERSATIONS_FILE, TRANSCRIPTS_FILE, REPORT_FILE = "train.jsonl", "transcripts.jsonl", "report.json"
CONVERSATION_KEYS = ("messages", "tools")
REASONS = ("wrong answer", "format error", "failed call", "equal to an earlier one", "above max_per_question")


def check_stage(config: RftFilterSection) -> None:
    check_embedding_model(config.embedding_model)
    for path in config.paths:
        check_rows(path)
    if config.environment is not None:
        load_environment(drop_pending_tools(config.environment))


def run_stage(config: RftFilterSection, *, out_dir: Path, choose_model: ChooseModel) -> StageResult:
    """Write `train.jsonl` (conversations), `transcripts.jsonl` (the kept rows as they were) and `report.json`: the
    numbers of kept and dropped trajectories, and the diversity before and after."""
    check_embedding_model(config.embedding_model)
    rows = [row for path in config.paths for row in read_trajectories(path)]
    kept, dropped = filter_trajectories(rows, config)
    if not kept:
        listed = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
        raise DataError(f"no trajectory of {', '.join(config.paths)} passed the filter: {listed}")
    environment = None if config.environment is None else load_environment(config.environment)
    write_rows(out_dir / CONVERSATIONS_FILE, build_rows(kept, environment, trains_forced=config.trains_forced))
    write_rows(out_dir / TRANSCRIPTS_FILE, (each.row for each in kept))
    before, after = (measure_diversity(each, embedding_model=config.embedding_model) for each in (rows, kept))
    save_json(out_dir / REPORT_FILE, {"kept": len(kept), "dropped": dropped, "before": before, "after": after})
    counts = {f"dropped: {reason}": count for reason, count in dropped.items() if count}
    table = format_table(["diversity", "before", "after"], format_diversity(before, after))
    return StageResult(figures={"kept trajectories": len(kept), **counts, TABLES: table})


def read_trajectories(path: str) -> list[TrajectoryRow]:
    """The rows of a file; DataError if one has no question, transcript or correctness, or a number that is not
    finite."""
    rows = read_rows(path)
    trajectories = [read_trajectory(row, where=f"row {index} of {path!r}") for index, row in enumerate(rows)]
    check_finite(rows, path=path)
    return trajectories


def read_trajectory(row: Row, *, where: str) -> TrajectoryRow:
    transcript, correctness = read_transcript(row, where=where), read_field(row, "correctness", where=where)
    if not isinstance(correctness, int | float) or not math.isfinite(correctness):
        raise DataError(f"{where}: correctness must be a finite number, got {correctness!r}")
    return TrajectoryRow(
        # ids of different files may be equal: a flywheel numbers its questions from 0
        question_id=(row.get("question_id"), row.get("question", transcript.question)),
        transcript=transcript,
        correctness=float(correctness),
        row=row,
    )


def filter_trajectories(
    rows: Sequence[TrajectoryRow], config: RftFilterSection
) -> tuple[list[TrajectoryRow], dict[str, int]]:
    """The kept trajectories in their order, and the number of removed ones by reason."""
    dropped: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
    seen: set[tuple[Any, str]] = set()
    passed: list[TrajectoryRow] = []
    for row in rows:
        reason = find_reason(row, config)
        text = " ".join(row.transcript.text.split())
        if reason is None and (row.question_id, text) in seen:
            reason = "equal to an earlier one"
        if reason is not None:
            dropped[reason] += 1
            continue
        seen.add((row.question_id, text))
        passed.append(row)
    kept = limit_per_question(passed, config.max_per_question)
    dropped["above max_per_question"] = len(passed) - len(kept)
    return kept, dict(dropped)


def find_reason(row: TrajectoryRow, config: RftFilterSection) -> str | None:
    """Why a trajectory is removed, whatever the others are; None if it passes."""
    if row.correctness < config.correct_at:
        return "wrong answer"
    if config.has_format_check and find_format_error(row.transcript) is not None:
        return "format error"
    if config.max_failed_calls is not None and row.transcript.failed_calls > config.max_failed_calls:
        return "failed call"
    return None


def limit_per_question(rows: Sequence[TrajectoryRow], limit: int | None) -> list[TrajectoryRow]:
    """At most `limit` trajectories of each question: one of each tool pattern, then a second of each, and so on, fewer
    calls first; in the order of the rows."""
    if limit is None:
        return list(rows)
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        groups[row.question_id].append(place)
    kept: set[int] = set()
    for places in groups.values():
        copies: Counter[tuple[str, ...]] = Counter()
        ordered = []
        for place in places:
            pattern = rows[place].pattern
            ordered.append((copies[pattern], len(pattern), place))
            copies[pattern] += 1
        kept.update(place for _, _, place in sorted(ordered)[:limit])
    return [row for place, row in enumerate(rows) if place in kept]


def build_rows(
    rows: Sequence[TrajectoryRow], environment: Environment | None, *, trains_forced: bool
) -> Iterator[dict[str, Any]]:
    """A conversation for each trajectory, with the other fields of its row."""
    for each in rows:
        more = {key: value for key, value in each.row.items() if key not in (*CONVERSATION_KEYS, "transcript")}
        try:
            if environment is None:
                system, tools = str(each.row.get("system") or ""), each.row.get("tools") or ()
                conversation = build_conversation(
                    each.transcript, system=system, tools=tools, trains_forced=trains_forced
                )
            else:
                own = environment.for_task(each.row)
                conversation = own.build_conversation(each.transcript, trains_forced=trains_forced)
        except ValueError as error:
            raise DataError(
                f"a trajectory of the question {each.transcript.question!r} cannot be trained: {error}"
            ) from error
        yield {**more, **conversation}
