"""Compare `MathBoxedRewardFn` with Trinity-RFT's function of that name, over variants of answers.

    python -m benchmarks.compat.reward_functions TRINITY DATA --out results/compat/reward_functions.txt

TRINITY is a folder with the package trinity-rft 0.6.0 (installed with `--no-deps --target`), DATA one with sets of
mathematics as `<set>.jsonl`. Each variant has a kind that says whether it equals the answer, so that where the two
differ the side that is right is known; a percent sign may be right or wrong, as the question may ask for percents.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import random
import re
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunesmith.compat.trinity_rewards import MathBoxedRewardFn
from tunesmith.judges.squad import list_accepted

SETS = ("math500", "amc23", "aime24", "aime25", "olympiadbench", "gsm8k")
NUMBER = re.compile(r"-?\d+")
OPEN = "percent sign"
LETTER = re.compile(r"(?<![\\\w])([a-z])(?![\w])")


def load_original(folder: Path) -> Any:
    """The class without the package's own imports, which need Ray."""
    sys.path.insert(0, str(folder))
    for name in ("trinity", "trinity.common", "trinity.common.rewards", "trinity.utils"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    for name, values in (
        ("trinity.common.rewards.reward_fn", {"RewardFn": object}),
        ("trinity.utils.log", {"get_logger": lambda *_: None}),
    ):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    return importlib.import_module("trinity.common.rewards.math_reward").MathBoxedRewardFn


def make_equal(gold: str) -> Iterator[tuple[str, str]]:
    """Kinds of answers with the value of `gold`."""
    yield "as it is", gold
    yield "without spaces", re.sub(r"(?<![a-zA-Z]) ", "", gold)
    yield "dfrac", gold.replace("\\frac", "\\dfrac")
    yield "left and right", gold.replace("(", "\\left(").replace(")", "\\right)") if "\\left" not in gold else gold
    yield "x = it", f"x={gold}" if not re.search(r"[=,]|\\text", gold) and re.search(r"\d", gold) else gold
    yield "in dollars", f"${gold}$"
    yield "full stop", f"{gold}."
    yield "thin spaces", gold.replace("+", "\\,+\\,")
    if NUMBER.fullmatch(gold):
        yield "decimal zero", f"{gold}.0"
        yield "thousands", f"{int(gold):,}"
        yield "unit", f"{gold}\\text{{ cm}}"
        yield "dollar sign", f"\\${gold}"
        yield "degrees", f"{gold}^\\circ"
        yield "fraction of one", f"\\frac{{{gold}}}{{1}}"
    if found := re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", gold):
        sign, top, bottom = found[1], int(found[2]), int(found[3])
        yield "plain fraction", f"{sign}{top}/{bottom}"
        yield "fraction not reduced", f"{sign}\\frac{{{3 * top}}}{{{3 * bottom}}}"
        if (value := f"{top / bottom:.4f}".rstrip("0")) and abs(float(value) - top / bottom) < 1e-12:
            yield "decimal", f"{sign}{value}"


def make_unequal(gold: str, other: str) -> Iterator[tuple[str, str]]:
    """Kinds of answers with another value."""
    yield "another answer", other
    if NUMBER.fullmatch(gold):
        yield OPEN, f"{gold}\\%"
    yield "a digit more", f"{gold}1" if gold[-1].isdigit() else f"{gold}+1"
    yield "minus for plus", gold.replace("+", "-", 1)
    yield "other sign", gold.removeprefix("-") if gold.startswith("-") else f"-({gold})"
    yield "other case", LETTER.sub(lambda found: found[1].upper(), gold, count=1)
    yield "without its minus", gold.replace("-", "", 1)
    yield "first of several", gold.partition(",")[0] if "(" not in gold else gold
    yield "next number", NUMBER.sub(lambda found: str(int(found[0]) + 1), gold, count=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trinity", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--per-set", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    original, ours = load_original(args.trinity)(), MathBoxedRewardFn()
    draw = random.Random(0)
    golds: list[str] = []
    for name in SETS:
        rows = [json.loads(line) for line in (args.data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        answers = [list_accepted({"answer": row.get("final_answer") or row["answer"]})[0] for row in rows]
        answers = list(dict.fromkeys(each.rpartition("####")[2].strip() for each in answers))
        golds += draw.sample(answers, min(args.per_set, len(answers)))
    golds = list(dict.fromkeys(golds))
    tables: dict[tuple[bool, str], Counter[str]] = defaultdict(Counter)
    examples: dict[tuple[str, str], list[str]] = defaultdict(list)
    formats, pairs = 0, 0
    for number, gold in enumerate(golds):
        variants = [(True, *each) for each in make_equal(gold)]
        variants += [(False, *each) for each in make_unequal(gold, golds[number - 1])]
        seen = {("", "")} | {(kind, gold) for _, kind, _ in variants if kind != "as it is"}
        for is_equal, kind, variant in variants:
            if (kind, variant) in seen:
                continue
            for response, has_think in (
                (f"so \\boxed{{{variant}}}", False), (f"<think>a</think> \\boxed{{{variant}}} end", True),
                (f"</think><think>\\boxed{{1}} \\boxed{{{variant}}}", True), (f"\\boxed {variant}$ more", False),
            ):  # fmt: skip
                if "$" in variant and "\\boxed " in response:
                    continue
                with contextlib.redirect_stdout(io.StringIO()):
                    theirs = original(response, gold, with_think=has_think, format_score_coef=0.2)
                mine = ours(response, gold, with_think=has_think, format_score_coef=0.2)
                pairs += 1
                formats += theirs["format_score"] != mine["format_score"]
                who = {(1.0, 1.0): "both", (0.0, 0.0): "neither", (1.0, 0.0): "ours", (0.0, 1.0): "theirs"}[
                    mine["accuracy"], theirs["accuracy"]
                ]
                tables[is_equal, kind][who] += 1
                if who in ("ours", "theirs") and len(examples[kind, who]) < 2:
                    examples[kind, who].append(f"    {who} 1: {response!r} for {gold!r}")
    total = sum(tables.values(), Counter[str]())
    right = sum(row["ours" if is_equal else "theirs"] for (is_equal, kind), row in tables.items() if kind != OPEN)
    wrong = sum(row["theirs" if is_equal else "ours"] for (is_equal, kind), row in tables.items() if kind != OPEN)
    differing = total["ours"] + total["theirs"]
    first = (
        f"{len(golds)} answers, {pairs} replies; format scores that differ: {formats}; accuracies that differ: "
        f"{differing}, of which the value is with ours in {right}, with theirs in {wrong}, and open in "
        f"{differing - right - wrong}"
    )
    lines = [first]
    lines.append(f"{'kind of answer':<24}{'equal':>7}{'both 1':>8}{'both 0':>8}{'ours 1':>8}{'theirs 1':>10}")
    for (is_equal, kind), row in sorted(tables.items(), key=lambda each: (not each[0][0], each[0][1])):
        cells = f"{row['both']:>8}{row['neither']:>8}{row['ours']:>8}{row['theirs']:>10}"
        equal = "open" if kind == OPEN else "yes" if is_equal else "no"
        lines.append(f"{kind:<24}{equal:>7}{cells}")
        lines += examples[kind, "ours"] + examples[kind, "theirs"]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
