"""Data of the recipes that learn from more than rewards, for the pocket model of `tunesmith demo`.

    python recipes/algorithms/prepare_data.py checkpoints/demo/<time>-seed0

`experts.jsonl` shows the calculator at work. `pairs.jsonl` sets each such conversation against an answer from the head,
which is off by a little, as the pocket model's are. `judgements.jsonl` says of either alone whether it is desirable.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.pipeline.demo.agent import build_demonstrations
from tunesmith.tasks.arithmetic import build_problems

NUM_PROBLEMS = 600
SEED = 1000
"""Not the demo's: other problems than those of its own demonstrations."""


def build_pair(conversation: dict[str, Any], answer: str, rng: random.Random) -> dict[str, Any]:
    """A conversation that uses the tool against a wrong answer at once."""
    messages = conversation["messages"]
    wrong = str(int(answer) + rng.choice((-10, -2, -1, 1, 2, 10)))
    rejected = [{"role": "assistant", "content": f"The answer is {wrong}."}]
    return {"prompt": messages[:2], "chosen": messages[2:], "rejected": rejected, "tools": conversation["tools"]}


def judge(pair: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One of the two, with what is to be thought of it."""
    is_good = rng.random() < 0.5
    completion = pair["chosen" if is_good else "rejected"]
    return {"prompt": pair["prompt"], "completion": completion, "label": is_good, "tools": pair["tools"]}


def save_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="folder of a demo")
    folder = parser.parse_args().demo
    rng = random.Random(SEED)
    problems = build_problems("train", num_problems=NUM_PROBLEMS, seed=SEED)
    experts = build_demonstrations(problems, seed=SEED, share_without_tool={1: 0.0, 2: 0.0, 3: 0.0})
    pairs = [build_pair(expert, problem.answer, rng) for expert, problem in zip(experts, problems, strict=True)]
    save_rows(folder / "experts.jsonl", experts)
    save_rows(folder / "pairs.jsonl", pairs)
    save_rows(folder / "judgements.jsonl", [judge(pair, rng) for pair in pairs])


if __name__ == "__main__":
    main()
