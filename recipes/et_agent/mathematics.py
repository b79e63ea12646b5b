"""Questions of GSM8K for the agent with the Python tool, and what Pareto sampling and fine-tuning are compared with: a
random choice of mixed questions, and repaired trajectories whose wrong beginnings are not trained."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tunesmith.chat.parsers import THINK_CLOSE
from tunesmith.environments import Transcript
from tunesmith.judges.numeric import extract_marked
from tunesmith.storage import load_json_lines
from tunesmith.tasks.load import write_rows


def take_questions(out_dir: Path, *, folder: str, num_train: int, num_test: int, seed: int) -> dict[str, int]:
    """Draw train.jsonl and test.jsonl from the files of these names; answers are their last numbers."""
    counts = {}
    for split, number in (("train", num_train), ("test", num_test)):
        rows = load_json_lines(Path(folder) / f"{split}.jsonl")
        chosen = random.Random(f"{seed}/{split}").sample(rows, number)
        answers = [{**row, "answer": extract_marked(row["answer"]), "ability": "math"} for row in chosen]
        counts[f"{split} questions"] = write_rows(out_dir / f"{split}.jsonl", answers)
    return counts


def draw_mixed(out_dir: Path, *, data: str, num_selected: int, correct_at: float, seed: int) -> dict[str, int]:
    """Draw train.jsonl from the questions with right and wrong rollouts, as the stage `pareto` selects it from them."""
    rows = load_json_lines(Path(data))
    mixed = [row for row in rows if len({each >= correct_at for each in row["pass_rate_correctness"]}) == 2]
    chosen = random.Random(f"{seed}/mixed").sample(mixed, min(num_selected, len(mixed)))
    return {"mixed questions": len(mixed), "selected": write_rows(out_dir / "train.jsonl", chosen)}


CONTINUED = ("hint_after_flaw", "hint_at_end", "reflect")
"""Operators whose trajectories begin with the wrong steps of their parents."""


def leave_wrong_beginnings(
    out_dir: Path, *, rows: str, kept: str, trajectories: str, how: Literal["mask", "drop"]
) -> dict[str, int]:
    """Write the `rows` of a filter so that no wrong beginning is trained: as context, or without these rows.

    `kept` are the transcripts of the rows, in order, and `trajectories` all of the flywheel.
    """
    parents = {
        each["trajectory_id"]: Transcript.from_json(each["transcript"]) for each in load_json_lines(Path(trajectories))
    }
    written, num_changed = [], 0
    for row, source in zip(load_json_lines(Path(rows)), load_json_lines(Path(kept)), strict=True):
        if source["operator"] in CONTINUED:
            num_changed += 1
            if how == "drop":
                continue
            own = Transcript.from_json(source["transcript"])
            length = count_shared_characters(own, parents[source["parent_id"]])
            *first, last = row["messages"]
            row = {**row, "messages": [*first, {**last, "content": mask_beginning(last["content"], length)}]}
        written.append(row)
    if not written:
        raise ValueError(f"all {num_changed} rows of {rows} begin with wrong steps")
    return {"changed": num_changed, "rows": write_rows(out_dir / "train.jsonl", written)}


def count_shared_characters(own: Transcript, parent: Transcript) -> int:
    """Characters of a continued trajectory that its parent wrote; the parent's last thought is open in it."""
    length = 0
    for segment, old in zip(own.segments, parent.segments, strict=False):
        begun = old.text.rstrip().removesuffix(THINK_CLOSE).rstrip()
        if segment.kind != old.kind or not segment.text.startswith(begun):
            break
        length += len(segment.text)
    return length


def mask_beginning(parts: Sequence[Mapping[str, Any]], length: int) -> list[dict[str, Any]]:
    """The parts of a message, of which the first characters are not trained."""
    masked = []
    for part in parts:
        text = part["text"]
        masked += [{**part, "text": text[:length], "weight": 0}, {**part, "text": text[length:]}]
        length = max(0, length - len(text))
    return [each for each in masked if each["text"]]
