"""The program of `apply_recipe`: reads operators and rows as JSON, and writes the rows that Data-Juicer keeps.

It imports nothing of tunesmith, so that it runs in another interpreter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

INDEX = "tunesmith_index"
STATS = "__dj__stats__"


def apply_operators(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        from data_juicer.core.data import NestedDataset
        from data_juicer.ops import OPERATORS, load_ops
    except ImportError as error:
        return {"refused": f"{error}: pip install 'tunesmith[data-juicer]', or set its argument python"}
    process = []
    for each in request["process"]:
        if len(each) != 1:
            return {"refused": f"an operator is one name and its arguments, got {each!r}"}
        name, given = next(iter(each.items()))
        if name not in OPERATORS.modules:
            return {"refused": f"Data-Juicer has no operator {name!r}"}
        process.append({name: {"text_key": request["text_key"], "num_proc": request["np"], **(given or {})}})
    try:
        operators = load_ops(process)
    except Exception as error:  # noqa: BLE001 its constructors raise many types for wrong arguments
        return {"refused": f"{type(error).__name__}: {error}"}
    rows = [{**row, INDEX: number} for number, row in enumerate(request["rows"])]
    found = NestedDataset.from_list(rows).process(operators).to_list() if rows else []
    return {"kept": [describe_row(row) for row in found]}


def describe_row(row: Mapping[str, Any]) -> dict[str, Any]:
    stats = row.get(STATS) or {}
    # a model that did not answer has an empty record, and the score 0
    empty = [name for name, each in stats.items() if name.endswith("_record") and not each]
    failed = {f"{name.removesuffix('_record')}_score" for name in empty}
    numbers = {
        name: float(each)
        for name, each in stats.items()
        if isinstance(each, int | float) and name not in failed and not isinstance(each, bool)
    }
    own = {name: each for name, each in row.items() if name not in (INDEX, STATS)}
    return {"index": row[INDEX], "row": own, "stats": numbers, "num_failed": len(failed)}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    json.dump(apply_operators(json.load(sys.stdin)), answers)


if __name__ == "__main__":
    main()
