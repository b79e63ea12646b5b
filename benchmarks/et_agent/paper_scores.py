"""Compare the scores of `--suite tir_paper` and `--suite tir` with those of ET-Agent's own evaluation code.

    python -m benchmarks.et_agent.paper_scores ET_AGENT DATA REPLIES...

ET_AGENT is the folder `evaluation` of a checkout of its repository, whose functions are called; DATA a folder with its
test sets as `<set>.jsonl`; REPLIES are the files in `parts/` of `tunesmith eval --suite tir_paper --out FOLDER`. Each
reply of the model is scored whole and cut in half. Variants are made of the accepted answers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tunesmith.judges.squad import compute_token_f1, list_accepted
from tunesmith.judges.tir import compute_paper_scores, find_ability, find_known_ability, read_paper_prediction

KEYS = ("em", "acc", "f1", "math_equal")


def make_variants(gold: str) -> set[str]:
    return {
        gold, gold.lower(), gold.replace(" ", ""), f"x={gold}", f"{gold}.", gold.replace("frac", "dfrac"), f"${gold}$",
        gold.replace("{", "").replace("}", ""), f"{gold}\\text{{ cm}}", f"the {gold}", " ".join(reversed(gold.split())),
        gold.replace("-", "+"), f"{gold} and more", f"\\left({gold}\\right)", "0.5", "\\frac12",
    } - {""}  # fmt: skip


def load_sets(folder: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for path in sorted(folder.glob("*.jsonl")):
        if find_known_ability(path.stem) is not None:
            yield path.stem, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("et_agent", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("replies", type=Path, nargs="+")
    args = parser.parse_args()
    sys.path.insert(0, str(args.et_agent))
    metrics, utils = importlib.import_module("src.metrics"), importlib.import_module("src.utils")

    def score(prediction: str, answer: Any, *, is_math: bool) -> dict[str, float]:
        if not prediction:
            return dict.fromkeys(KEYS, 0.0)
        if not is_math:
            return dict(metrics.evaluate_qa_prediction(prediction, answer))
        return dict(
            metrics.evaluate_math_prediction(prediction, str(answer[0] if isinstance(answer, list) else answer))
        )

    def differs(left: dict[str, float], right: dict[str, float]) -> bool:
        return any(abs(left[key] - right[key]) > 1e-9 for key in KEYS)

    replies, wrong, own = Counter[str](), Counter[str](), Counter[str]()
    for path in args.replies:
        for task in json.loads(path.read_text(encoding="utf-8"))["tasks"]:
            name = task["task_id"].partition("/")[0]
            is_math, answer = find_known_ability(name) == "math", task["row"]["answer"]
            if name == "gsm8k":
                answer = answer.rpartition("####")[2].strip().replace(",", "")
            for attempt in task["attempts"]:
                if attempt["failure"]:
                    continue
                whole = attempt["response"]
                replies[name] += 1
                for part, text in (("whole", whole), ("cut in half", whole[: len(whole) // 2])):
                    last = "\n".join(text.replace("\n\n", "\n").strip().split("\n")[-5:])
                    theirs = score(utils.extract_answer(text) or last, answer, is_math=is_math)
                    ours = compute_paper_scores(read_paper_prediction(text), text, answer, is_math=is_math)
                    wrong[part] += differs(theirs, ours)
                key = "math_equal" if is_math else "f1"
                own[name] += abs(attempt["metrics"][key] - attempt["metrics"][f"paper_{key}"]) > 1e-9
    total = replies.total()
    print(f"rollouts of the model, one for each task: {total}: {dict(replies)}")
    print(f"--suite tir_paper against ET-Agent's code: {wrong['whole']} disagreements on {total} whole replies,")
    print(f"  {wrong['cut in half']} on the same {total} cut in half, so {wrong.total()} on {2 * total} outputs")
    print(f"--suite tir against ET-Agent's code: {own.total()} disagreements on {total} whole replies: {dict(own)}")

    variants, differing, other_f1 = 0, 0, 0
    for name, rows in load_sets(args.data):
        is_math = find_known_ability(name) == "math"
        abilities, guesses = Counter[str](), Counter[str]()
        for row in rows:
            answer = row.get("final_answer") or row["answer"]
            accepted = list_accepted({"answer": answer})
            abilities[find_ability({"ability": find_known_ability(name)}, accepted)] += 1
            guesses[find_ability({}, accepted)] += 1
            for gold in accepted[:2]:
                for each in make_variants(gold):
                    ours = compute_paper_scores(each, "", answer, is_math=is_math)
                    given = answer
                    if is_math and isinstance(answer, str):
                        given = answer.rpartition("####")[2].strip()
                    differing += differs(score(each, given, is_math=is_math), ours)
                    other_f1 += not is_math and abs(compute_token_f1(each, accepted) - ours["f1"]) > 1e-9
                    variants += 1
        print(f"{name}: {len(rows)} rows scored as {dict(abilities)}, in a set of an unknown name {dict(guesses)}")
    print(f"variants of accepted answers: {variants}, disagreements {differing}; SQuAD's F1 differs in {other_f1}")


if __name__ == "__main__":
    main()
