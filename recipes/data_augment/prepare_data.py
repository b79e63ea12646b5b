"""Write math problems with the pass rates of two reference models as JSON lines: python prepare_data.py

The training set is the math part of LLM360/guru-RL-92k, the held-out set AIME 2024. A row has a question, an answer
after `####`, and the pass rates; rows that lack one of these are dropped and counted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datasets import load_dataset

TRAIN_SET, TRAIN_FILE = "LLM360/guru-RL-92k", "train/math__combined_54.4k.parquet"
EVAL_SET = "HuggingFaceH4/aime_2024"
INSTRUCTION = "Please output the final answer within \\boxed{}."
"""Part of every question of the data set; removed, because the system prompt of the agent contains it."""
PASS_RATES = ("qwen2.5_7b_pass_rate", "qwen3_30b_pass_rate")


def transform_train_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row of guru in GSM8K's format, with pass rates; None when a field is missing."""
    prompt, reward_model = row.get("prompt"), row.get("reward_model")
    if not prompt or not reward_model or reward_model.get("ground_truth") is None:
        return None
    rates = {key: row.get(key) for key in PASS_RATES}
    if not all(isinstance(rate, int | float) and math.isfinite(rate) and 0 <= rate <= 1 for rate in rates.values()):
        return None
    question = prompt[0]["content"].replace(INSTRUCTION, "").strip()
    return {"question": question, "answer": f"#### {reward_model['ground_truth']}", **rates}


def transform_eval_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": row["problem"], "answer": f"#### {row['answer']}"}


def save_rows(path: Path, rows: Iterable[dict[str, Any] | None]) -> None:
    """Write the rows that are not None; print how many were kept and dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    num_kept = num_dropped = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            if row is None:
                num_dropped += 1
                continue
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            num_kept += 1
    print(f"{path}: {num_kept} rows, {num_dropped} dropped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", help="local parquet file of the training set; default: the hub")
    parser.add_argument("--eval", help="local parquet file of the held-out set; default: the hub")
    parser.add_argument("--out", type=Path, default=Path("data"), help="output folder")
    arguments = parser.parse_args()
    train = (
        load_dataset("parquet", data_files=arguments.train, split="train")
        if arguments.train
        else load_dataset(TRAIN_SET, data_files=TRAIN_FILE, split="train")
    )
    save_rows(arguments.out / "train" / "train.jsonl", map(transform_train_row, train))
    held_out = (
        load_dataset("parquet", data_files=arguments.eval, split="train")
        if arguments.eval
        else load_dataset(EVAL_SET, split="train")
    )
    save_rows(arguments.out / "eval" / "test.jsonl", map(transform_eval_row, held_out))


if __name__ == "__main__":
    main()
