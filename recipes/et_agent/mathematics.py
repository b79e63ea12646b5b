"""Questions of GSM8K for the agent with the Python tool, and a random choice of mixed questions to compare with."""

from __future__ import annotations

import random
from pathlib import Path

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
