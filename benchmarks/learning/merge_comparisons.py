"""Merge separate `tunesmith eval` runs on the same tasks into one comparison, with intervals and paired tests.

python -m benchmarks.learning.merge_comparisons base/comparison.json sft/comparison.json --outcome-key exact \\
    --out FOLDER
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from tunesmith.commands.eval.comparison import ModelResult, compare_results, compute_result, format_comparison
from tunesmith.commands.eval.sample_scores import scores_from_json
from tunesmith.storage import save_text


def load_comparison(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="comparison.json, or comparison.json.gz")
    parser.add_argument("--seed", type=int, default=1, help="seed of the bootstrap")
    parser.add_argument("--outcome-key", help="metric that decides whether a rollout passed")
    parser.add_argument("--out", type=Path, required=True, help="folder for comparison.md and comparison.json.gz")
    arguments = parser.parse_args()
    results: dict[str, dict[str, ModelResult]] = {}
    for path in arguments.files:
        for name, of_set in load_comparison(path).items():
            for label, saved in of_set["models"].items():
                results.setdefault(name, {})[label] = compute_result(
                    label, label, scores_from_json(saved["tasks"]), seed=arguments.seed, seconds=saved["seconds"],
                    outcome_key=arguments.outcome_key,
                )  # fmt: skip
    for name, models in results.items():
        task_ids = {tuple(task.task_id for task in result.tasks) for result in models.values()}
        if len(task_ids) > 1:
            raise SystemExit(f"the models were not evaluated on the same tasks of {name}")
    comparison = {name: compare_results(name, models, seed=arguments.seed) for name, models in results.items()}
    save_text(arguments.out / "comparison.md", format_comparison(comparison))
    text = json.dumps({name: each.to_json() for name, each in comparison.items()})
    (arguments.out / "comparison.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
