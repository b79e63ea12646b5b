"""Conversations to fine-tune on, as controls of the training on rewards.

    python -m recipes.function_calling.conversations answers --out answers.jsonl
    python -m recipes.function_calling.conversations form --out form.jsonl

`answers` has the training questions of `run.yaml` with the first accepted value of each argument, and a sentence where
no function fits. `form` has 200 requests of functions of our own, which the benchmark does not have: they show how
calls are written, one or two of them, and say nothing about its functions.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tunesmith.environments.sets.bfcl import Row, describe, find_data, load_rows, offer_name, split_irrelevance
from tunesmith.environments.sets.bfcl_calls import find_mistake

NO_CALL = "None of the functions can answer this."
NUM_FORM = 200
NUM_IRRELEVANT = 184
DEVICES: Mapping[str, tuple[str, Mapping[str, Sequence[Any]]]] = {
    "aquarium.feed_fish": ("Feed {grams} grams to the fish in the {tank}.", {
        "tank": ["front tank", "back tank", "quarantine tank"], "grams": [1, 2, 5, 8]}),
    "kiln.start_firing": ("Fire the kiln with program {program}, up to {degrees} degrees.", {
        "program": ["bisque", "glaze", "raku"], "degrees": [980, 1040, 1220]}),
    "loom.weave_rows": ("Weave {rows} rows of {pattern} on the loom.", {
        "pattern": ["twill", "herringbone", "plain weave"], "rows": [12, 40, 64]}),
    "beehive.open_gate": ("Open the gate of hive {hive} for {minutes} minutes.", {
        "hive": ["A", "B", "C"], "minutes": [10, 15, 45]}),
    "telescope.close_dome": ("Close the dome of {site} at {percent} percent speed.", {
        "site": ["the north hut", "the south hut"], "percent": [20, 50, 100]}),
    "bakery.prove_dough": ("Let the {dough} dough rise at {humidity} percent humidity.", {
        "dough": ["rye", "spelt", "brioche"], "humidity": [65, 75, 85]}),
}  # fmt: skip
"""Name -> a request, and the values of its arguments."""


def choose(accepted: Sequence[Any]) -> Any:
    """The first of the accepted values; an object in it has accepted values of its keys."""
    value = accepted[0]
    objects = value if isinstance(value, list) else [value]
    chosen = [choose_keys(each) if isinstance(each, dict) else each for each in objects]
    return chosen if isinstance(value, list) else chosen[0]


def choose_keys(values: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    return {key: choose(each) for key, each in values.items() if isinstance(each, list) and each and each[0] != ""}


def build_row(messages: Sequence[Any], tools: Sequence[Any], calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    reply: dict[str, Any] = {"role": "assistant", "content": "" if calls else NO_CALL}
    if calls:
        written = [{"name": offer_name(name), "arguments": json.dumps(arguments)} for name, arguments in calls]
        reply["tool_calls"] = [
            {"id": str(number), "type": "function", "function": each} for number, each in enumerate(written)
        ]
    return {"messages": [*messages, reply], "tools": list(tools)}


def load_tasks(folder: Path) -> dict[str, Row]:
    """The tasks of `run.yaml`."""
    return load_rows(folder, "") | split_irrelevance(folder, NUM_IRRELEVANT)


def list_answers(folder: Path) -> list[dict[str, Any]]:
    """Of each training task; without those whose first values its own judge refuses."""
    rows = []
    for identity, row in load_tasks(folder).items():
        accepted = row.line.get("accepted", ())
        calls = [(name, choose_keys(values)) for call in accepted for name, values in call.items()]
        mistake = find_mistake(row.line["function"], calls, accepted, is_parallel="parallel" in identity)
        if not row.is_held_out and not mistake:
            rows.append(build_row(row.line["question"][0], row.schemas, calls))
    return rows


def list_forms() -> list[dict[str, Any]]:
    rng, rows = random.Random(0), []
    for _ in range(NUM_FORM):
        names = rng.sample(list(DEVICES), rng.randint(1, 3))
        requests, calls = [], []
        for name in names[: rng.choice([1, 1, 1, 2])]:
            request, values = DEVICES[name]
            arguments = {key: rng.choice(each) for key, each in values.items()}
            requests.append(request.format(**arguments))
            calls.append((name, arguments))
        tools = [describe_device(name) for name in names]
        rows.append(build_row([{"role": "user", "content": " ".join(requests)}], tools, calls))
    return rows


def describe_device(name: str) -> dict[str, Any]:
    request, values = DEVICES[name]
    properties = {
        key: {"type": "string" if isinstance(each[0], str) else "integer", "description": f"The {key}."}
        for key, each in values.items()
    }
    parameters = {"type": "dict", "properties": properties, "required": list(values)}
    return describe({"name": name, "description": request.replace("{", "").replace("}", ""), "parameters": parameters})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["answers", "form"])
    parser.add_argument("--data", help="folder of bfcl-eval's data; the installed package's without it")
    parser.add_argument("--out", required=True, type=Path, help="JSON lines file")
    arguments = parser.parse_args()
    rows = list_forms() if arguments.kind == "form" else list_answers(find_data(arguments.data))
    arguments.out.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


if __name__ == "__main__":
    main()
