"""A stage of et_agent.py: questions at random, where the recipe has Pareto sampling."""

from __future__ import annotations

import random
from pathlib import Path


def select(out_dir: Path, *, data: str, num_selected: int, seed: int, curriculum_round: int) -> dict[str, int]:
    """Write `num_selected` of the rows of a file, drawn without replacement anew in each round, to train.jsonl."""
    rows = Path(data).read_text(encoding="utf-8").splitlines(keepends=True)
    chosen = random.Random(f"{seed}/selection/{curriculum_round}").sample(rows, min(num_selected, len(rows)))
    (out_dir / "train.jsonl").write_text("".join(chosen), encoding="utf-8")
    return {"questions": len(rows), "selected questions": len(chosen)}
