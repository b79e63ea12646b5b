"""The judge of single-turn calls against the checker of the package bfcl-eval, on accepted calls and mutated ones.

    python -m benchmarks.environments.bfcl_checker --out results/environments/bfcl_checker.txt

The package's module of models, which needs many others, is replaced by an empty one in this process.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tunesmith.environments.sets.bfcl import TRAINED, find_data, load_rows
from tunesmith.environments.sets.bfcl_calls import find_mistake

CATEGORIES = (*TRAINED, "live_parallel", "live_parallel_multiple")


def load_checker() -> Any:
    stand_ins: dict[str, dict[str, Any]] = {
        "constants.model_config": {"MODEL_CONFIG_MAPPING": {"m": SimpleNamespace(underscore_to_dot=False)}},
        "eval_checker.ast_eval.type_convertor.java_type_converter": {"java_type_converter": None},
        "eval_checker.ast_eval.type_convertor.js_type_converter": {"js_type_converter": None},
    }
    for name, attributes in stand_ins.items():
        module = ModuleType(f"bfcl_eval.{name}")
        vars(module).update(attributes)
        sys.modules[module.__name__] = module
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    return lambda functions, calls, truth, category: ast_checker(
        functions, [{name: each} for name, each in calls], truth, Language.PYTHON, category, "m"
    )["valid"]


def draw_value(accepted: Any, rng: random.Random) -> Any:
    """A value from an accepted one; dictionaries list the accepted values of each key."""
    if isinstance(accepted, dict):
        lists = {key: each if isinstance(each, list) else [each] for key, each in accepted.items()}
        return {key: draw_value(rng.choice(each), rng) for key, each in lists.items() if each and rng.random() < 0.95}
    if isinstance(accepted, list) and accepted and isinstance(accepted[0], dict):
        return [draw_value(each, rng) for each in accepted]
    return copy.deepcopy(accepted)


def draw_calls(truth: Any, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    calls = []
    for entry in truth:
        ((name, values),) = entry.items()
        drawn = {key: draw_value(rng.choice(each), rng) for key, each in values.items() if each}
        calls.append((name, {key: value for key, value in drawn.items() if value != "" or rng.random() < 0.2}))
    return calls


def mutate_value(value: Any, rng: random.Random) -> Any:
    other: list[Any] = [str(value), True, None, [value]]
    if isinstance(value, str):
        other += [
            value.upper(),
            value.replace(" ", ""),
            f"{value}x",
            value.replace(",", " "),
            "",
            value[:-1],
            f"{value}.",
        ]
        other += [value.replace("'", '"'), {}]
    elif isinstance(value, bool):
        other += [not value, int(value)]
    elif isinstance(value, int | float):
        other += [value + 1, -value, float(value), int(value), value + 0.5]
    elif isinstance(value, list):
        index = rng.randrange(len(value)) if value else 0
        inner = [*value[:index], *[mutate_value(each, rng) for each in value[index : index + 1]], *value[index + 1 :]]
        other += [inner, inner, inner, value * 2, value[:-1], value[::-1], [], [*value, 1]]
    elif isinstance(value, dict):
        changed = rng.choice(list(value)) if value else None
        entries = {key: mutate_value(each, rng) if key == changed else each for key, each in value.items()}
        other += [entries, entries, entries, {k: v for k, v in value.items() if k != changed}, {**value, "zz": 1}]
    return rng.choice(other)


def mutate_calls(calls: list[tuple[str, dict[str, Any]]], rng: random.Random) -> None:
    for _ in range(rng.randint(1, 2)):
        if not calls:
            return
        index, kind = rng.randrange(len(calls)), rng.randrange(12)
        name, arguments = calls[index]
        if kind == 0:
            calls.append((name, dict(arguments)))
        elif kind == 1:
            calls.pop(index)
        elif kind == 2:
            calls[index] = f"{name}x", arguments
        elif kind == 3:
            arguments["extra"] = 1
        elif kind == 4:
            rng.shuffle(calls)
        elif arguments:
            key = rng.choice(list(arguments))
            changed = mutate_value(arguments.pop(key), rng)
            if kind > 5:
                arguments[key] = changed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variants", type=int, default=40, help="of each row, beside its accepted calls")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    is_valid, rng, lines = load_checker(), random.Random(0), []
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for category in CATEGORIES:
        for row in (each.line for each in load_rows(find_data(None), category).values()):
            for variant in range(given.variants + 1):
                calls = draw_calls(row["accepted"], rng)
                if variant:
                    mutate_calls(calls, rng)
                try:
                    expected = is_valid(row["function"], copy.deepcopy(calls), row["accepted"], category)
                except Exception as error:  # noqa: BLE001 - the checker raises on some types of values
                    expected = f"raises {type(error).__name__}"
                found = (
                    find_mistake(row["function"], calls, row["accepted"], is_parallel="parallel" in category) is None
                )
                counts[category, "mutated" if variant else "accepted", str(expected), str(found)] += 1
                if isinstance(expected, bool) and expected != found:
                    lines.append(f"DIFFERENT {row['id']}: package {expected}, here {found}: {calls}")
    different = len(lines)
    lines += [f"{category} {kind}: package {one}, here {other}: {number}" for (category, kind, one, other), number in
              sorted(counts.items())]  # fmt: skip
    lines.append(f"{sum(counts.values())} answers, {different} different verdicts")
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
