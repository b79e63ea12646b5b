"""Questions of GSM8K for the agent with the Python tool, demonstrations of its format, and what Pareto sampling and
fine-tuning are compared with: a random choice of mixed questions, trajectories without text of the author, and repaired
ones whose wrong beginnings are not trained."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from tunesmith.chat.parsers.reply import THINK_CLOSE
from tunesmith.commands.prepare.rows import check_calculations
from tunesmith.config import EnvironmentSection
from tunesmith.engine.event_loop.notebook import run_outside_of_loops
from tunesmith.environments import Environment, Transcript
from tunesmith.judges.numeric import extract_marked
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_environment
from tunesmith.storage import load_json_lines
from tunesmith.tasks.load import write_rows
from tunesmith.tasks.solutions import Calculation, Solution, SolutionError, parse_solution


def take_questions(
    out_dir: Path,
    *,
    folder: str,
    num_train: int,
    num_test: int,
    num_demonstrated: int,
    max_calculations: int,
    seed: int,
) -> dict[str, int]:
    """Draw train.jsonl and test.jsonl from the files of these names, and demonstrated.jsonl from other rows of the
    first one; answers are their last numbers. Questions whose solution has more calculations are left out."""
    counts = {}
    for split, parts in (
        ("train", {"train": num_train, "demonstrated": num_demonstrated}),
        ("test", {"test": num_test}),
    ):
        rows = load_json_lines(Path(folder) / f"{split}.jsonl")
        short = [row for row in rows if 0 < len(read_calculations(row["answer"])) <= max_calculations]
        chosen = iter(random.Random(f"{seed}/{split}").sample(short, sum(parts.values())))
        for name, number in parts.items():
            written = [
                {**row, "answer": extract_marked(row["answer"]), "solution": row["answer"], "ability": "math"}
                for row in islice(chosen, number)
            ]
            counts[f"{name} questions"] = write_rows(out_dir / f"{name}.jsonl", written)
    return counts


def read_calculations(solution: str) -> tuple[Calculation, ...]:
    """The calculations of a worked solution; none if the calculator does not confirm them."""
    try:
        return check_calculations(parse_solution(solution)).calculations
    except SolutionError:
        return ()


def write_demonstrations(out_dir: Path, *, questions: str, environment: Mapping[str, Any], seed: int) -> dict[str, int]:
    """Write conversations.jsonl: worked solutions in the agent's format, their calculations run by its Python tool.

    Every second solution, drawn at random, calls the tool for its last calculation alone.
    """
    agent = load_environment(build_section(EnvironmentSection, environment))
    rng = random.Random(f"{seed}/demonstrations")
    plans = []
    for row in load_json_lines(Path(questions)):
        solution = check_calculations(parse_solution(row["solution"]))
        if rng.random() < 0.5:
            while len(solution.calculations) > 1:
                solution = solution.join(0)
        plans.append((row["question"], solution))
    made = run_outside_of_loops(lambda: asyncio.run(_demonstrate_all(plans, agent)))
    kept = [agent.build_conversation(each) for each in made if not (each.failed_calls or each.refused_calls)]
    return {"conversations": write_rows(out_dir / "conversations.jsonl", kept)}


async def _demonstrate_all(plans: Sequence[tuple[str, Solution]], agent: Environment) -> list[Transcript]:
    return [await demonstrate(question, solution, agent) for question, solution in plans]


async def demonstrate(question: str, solution: Solution, agent: Environment) -> Transcript:
    """The transcript of a solution whose calculations are calls of Python."""
    transcript = agent.begin(question)
    for text, calculation in zip(solution.texts, solution.calculations, strict=False):
        thought, code = text or f"{calculation.expression} =", f"print({calculation.expression})"
        transcript = await agent.execute(agent.write_call(transcript, tool="python", thought=thought, text=code))
    return agent.write_answer(transcript, thought=solution.texts[-1] or solution.answer, text=solution.answer)


def draw_mixed(out_dir: Path, *, data: str, num_selected: int, correct_at: float, seed: int) -> dict[str, int]:
    """Draw train.jsonl from the questions with right and wrong rollouts, as the stage `pareto` selects it from them."""
    rows = load_json_lines(Path(data))
    mixed = [row for row in rows if len({each >= correct_at for each in row["pass_rate_correctness"]}) == 2]
    chosen = random.Random(f"{seed}/mixed").sample(mixed, min(num_selected, len(mixed)))
    return {"mixed questions": len(mixed), "selected": write_rows(out_dir / "train.jsonl", chosen)}


def keep_operators(out_dir: Path, *, rows: str, kept: str, operators: Sequence[str]) -> dict[str, int]:
    """Write the `rows` of a filter that come from these operators; `kept` are the transcripts of the rows, in order."""
    sources = load_json_lines(Path(kept))
    chosen = [
        row for row, source in zip(load_json_lines(Path(rows)), sources, strict=True) if source["operator"] in operators
    ]
    return {"rows": write_rows(out_dir / "train.jsonl", chosen), "left out": len(sources) - len(chosen)}


CONTINUED = ("hint_after_flaw", "hint_at_end", "reflect")
"""Operators whose trajectories begin with the wrong steps of their parents."""


def leave_wrong_beginnings(
    out_dir: Path, *, rows: str, kept: str, trajectories: str, how: Literal["mask", "drop"]
) -> dict[str, int]:
    """Write the `rows` of a filter so that no wrong beginning is trained: as context, or without these rows.

    `kept` are the transcripts of the rows, in order, and `trajectories` all of the flywheel.
    """
    parents = {
        each["trajectory_id"]: Transcript.from_json(each["transcript"]) for each in load_json_lines(Path(trajectories))
    }
    written, num_changed = [], 0
    for row, source in zip(load_json_lines(Path(rows)), load_json_lines(Path(kept)), strict=True):
        if source["operator"] in CONTINUED:
            num_changed += 1
            if how == "drop":
                continue
            own = Transcript.from_json(source["transcript"])
            length = count_shared_characters(own, parents[source["parent_id"]])
            *first, last = row["messages"]
            row = {**row, "messages": [*first, {**last, "content": mask_beginning(last["content"], length)}]}
        written.append(row)
    if not written:
        raise ValueError(f"all {num_changed} rows of {rows} begin with wrong steps")
    return {"changed": num_changed, "rows": write_rows(out_dir / "train.jsonl", written)}


def count_shared_characters(own: Transcript, parent: Transcript) -> int:
    """Characters of a continued trajectory that its parent wrote; the parent's last thought is open in it."""
    length = 0
    for segment, old in zip(own.segments, parent.segments, strict=False):
        begun = old.text.rstrip().removesuffix(THINK_CLOSE).rstrip()
        if segment.kind != old.kind or not segment.text.startswith(begun):
            break
        length += len(segment.text)
    return length


def mask_beginning(parts: Sequence[Mapping[str, Any]], length: int) -> list[dict[str, Any]]:
    """The parts of a message, of which the first characters are not trained."""
    masked = []
    for part in parts:
        text = part["text"]
        masked += [{**part, "text": text[:length], "weight": 0}, {**part, "text": text[length:]}]
        length = max(0, length - len(text))
    return [each for each in masked if each["text"]]
