"""Write expert and preference data for the recipes that need more than rewards, for the model of `tunesmith demo`.

    python recipes/algorithms/prepare_data.py checkpoints/demo/<time>-seed0

`experts.jsonl` holds conversations that use the calculator. `pairs.jsonl` pairs each of them (chosen) with a slightly
wrong answer without the tool (rejected), the pocket model's usual error. `judgements.jsonl` holds one of the two with a
label: desirable or not.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunesmith.commands.demo.agent import build_demonstrations
from tunesmith.tasks.arithmetic import build_problems

NUM_PROBLEMS = 600
SEED = 1000
"""Differs from the demo's seed, so these are other problems than those of its demonstrations."""


def build_pair(conversation: dict[str, Any], answer: str, rng: random.Random) -> dict[str, Any]:
    """A preference pair: chosen uses the tool, rejected is a wrong answer without it."""
    messages = conversation["messages"]
    wrong = str(int(answer) + rng.choice((-10, -2, -1, 1, 2, 10)))
    rejected = [{"role": "assistant", "content": f"The answer is {wrong}."}]
    return {"prompt": messages[:2], "chosen": messages[2:], "rejected": rejected, "tools": conversation["tools"]}


def draw_judgement(pair: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One completion of the pair, drawn at random, with its label (KTO)."""
    is_good = rng.random() < 0.5
    completion = pair["chosen" if is_good else "rejected"]
    return {"prompt": pair["prompt"], "completion": completion, "label": is_good, "tools": pair["tools"]}


def save_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path, help="output folder of tunesmith demo")
    folder = parser.parse_args().demo
    rng = random.Random(SEED)
    problems = build_problems("train", num_problems=NUM_PROBLEMS, seed=SEED)
    experts = build_demonstrations(problems, seed=SEED, share_without_tool={1: 0.0, 2: 0.0, 3: 0.0})
    pairs = [build_pair(expert, problem.answer, rng) for expert, problem in zip(experts, problems, strict=True)]
    save_rows(folder / "experts.jsonl", experts)
    save_rows(folder / "pairs.jsonl", pairs)
    save_rows(folder / "judgements.jsonl", [draw_judgement(pair, rng) for pair in pairs])


if __name__ == "__main__":
    main()
