"""Which model fits which card: the table of docs/guides/lora_one_gpu.md, from the estimator of `doctor --plan`.

A cell names the first that fits, with the defaults of a run file and contexts of 4,096 tokens: all weights, LoRA, LoRA
on 4-bit weights; `+`: with gradient checkpointing.

    python -m benchmarks.commands.memory_plan --out results/commands/memory_plan.txt
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path

from benchmarks.shared.shapes import SHAPES
from tunesmith.commands.doctor.plan import plan_memory

CARDS_GIB = (12, 16, 24, 48, 80, 140)
NAMES = {
    "as it is": "all", "checkpoints": "all +", "LoRA": "LoRA", "LoRA, ckpt": "LoRA +", "4 bits, ckpt": "4 bits +",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines = ["| model | " + " | ".join(f"{card} GiB" for card in CARDS_GIB) + " |", "|---" * (len(CARDS_GIB) + 1) + "|"]
    with tempfile.TemporaryDirectory() as name:
        for shape, config in SHAPES.items():
            copy.deepcopy(config).save_pretrained(f"{name}/{shape}")
            cells = []
            for card in CARDS_GIB:
                plan = plan_memory(f"{name}/{shape}", memory_gib=card)
                cells.append(next((NAMES[each] for each in plan.list_fitting()), "none"))
            lines.append(f"| {shape} | " + " | ".join(cells) + " |")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
