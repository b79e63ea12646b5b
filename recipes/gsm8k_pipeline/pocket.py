"""Functions of the pocket pipeline: word problems with solutions in GSM8K's format, a pocket model whose tokenizer is
trained on the prepared conversations, and a judge that accepts only the exact number."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tunesmith.judges.answers import match_numeric
from tunesmith.judges.composite import RewardPart, compose
from tunesmith.judges.style import score_conciseness, score_format, score_reasoning
from tunesmith.model.checkpoint import save_model_files
from tunesmith.model.pocket import CONTROL_TOKENS, MARKUP_TOKENS, build_pocket_model, build_pocket_tokenizer
from tunesmith.tasks.arithmetic import Problem, Split, build_problems

MARKUP = re.compile("|".join(map(re.escape, (*CONTROL_TOKENS, *MARKUP_TOKENS))))

judge = compose(
    RewardPart(name="accuracy", weight=0.50, score=match_numeric),
    RewardPart(name="format", weight=0.20, score=score_format),
    RewardPart(name="reasoning", weight=0.20, score=score_reasoning),
    RewardPart(name="conciseness", weight=0.10, score=score_conciseness, lowest=-0.5),
    gate="accuracy",
)
"""The composite reward of GSM8K with exact accuracy: a tolerance of 1 % is often less than 1 for these answers."""


def make_problems(out_dir: Path, *, num_train: int, num_test: int, seed: int) -> dict[str, int]:
    """Write train.jsonl and test.jsonl; they share no question, for any seed."""
    sizes: dict[Split, int] = {"train": num_train, "test": num_test}
    for split, size in sizes.items():
        rows = map(build_row, build_problems(split, num_problems=size, seed=seed))
        (out_dir / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {f"{split} problems": size for split, size in sizes.items()}


def build_row(problem: Problem) -> dict[str, str]:
    """A question and its solution, with the calculation marked as in GSM8K."""
    calculation = f"<<{problem.expression}={problem.answer}>>{problem.answer}"
    solution = f"Let the calculator say how many: {calculation} is how many there are."
    return {"question": problem.question, "answer": f"{solution}\n#### {problem.answer}"}


def make_model(out_dir: Path, *, conversations: str, seed: int, is_for_gguf: bool = False) -> dict[str, int]:
    """Write an untrained model to `out_dir/model`; `conversations` is a JSON lines file of messages and tools.

    `is_for_gguf` gives it a tokenizer that llama.cpp supports, so that the last stage can write GGUF too.
    """
    rows = [json.loads(line) for line in Path(conversations).read_text(encoding="utf-8").splitlines()]
    renderer = build_pocket_tokenizer()
    texts = [renderer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in rows[:1000]]
    tokenizer = build_pocket_tokenizer(MARKUP.sub("", "".join(texts)), is_for_gguf=is_for_gguf)
    model = build_pocket_model(tokenizer, seed=seed)
    (out_dir / "model").mkdir()
    save_model_files(out_dir / "model", model, tokenizer)
    return {"parameters": model.num_parameters(), "tokens of the vocabulary": len(tokenizer)}
