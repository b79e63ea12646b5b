"""Filtering and conversion of rows: question with worked solution -> `RowCandidate` -> row with a conversation.

A `RowCandidate` is a question with its parsed solution; `build_row` converts it after all filters. Each dropped row is
counted under exactly one reason, and the first examples of each reason are kept for the report.

In the conversation each calculation of a solution, or only the last one, becomes an assistant message with reasoning
and a tool call, followed by the tool's result. The last message ends in `#### <answer>`. Stated results are verified
with the calculator before the conversion, and conversations with the judge that scores the agent after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import fmean
from typing import Any, Literal

from tunesmith.chat.parsers.reply import THINK_CLOSE, THINK_OPEN
from tunesmith.commands.prepare.calculator_agent import SYSTEM_PROMPT, TOOLS
from tunesmith.config import ContaminationSection, ParaphraseSection, PrepareSection
from tunesmith.environments import protocols
from tunesmith.errors import DataError
from tunesmith.judges.answers import match_numeric
from tunesmith.judges.style import score_conciseness, score_format, score_reasoning
from tunesmith.judges.transcript import Transcript, build_transcript
from tunesmith.tasks.contamination import find_overlaps
from tunesmith.tasks.operators import paraphrase
from tunesmith.tasks.solutions import ANSWER_MARK, Calculation, Solution, SolutionError, parse_solution
from tunesmith.tools.calculator import CALCULATOR_TOOL, ExpressionError, calculate, compute_expression
from tunesmith.types import Task

Style = Literal["all", "last"]


def check_calculations(solution: Solution) -> Solution:
    """Verify every calculation of a solution with the calculator; return the solution with those that become calls.

    A calculation without an operator, and an unmarked equation that is only part of a term, become plain text again.
    Raises SolutionError with the reason `wrong_calculation` for a marked calculation, `wrong_equation` for an unmarked
    equation, and `no_calculation` if none remains.
    """
    for index in reversed(range(len(solution.calculations))):
        calculation = solution.calculations[index]
        if not calculation.is_marked and not calculation.is_balanced:
            solution = solution.join(index)
            continue
        if not is_confirmed(calculation):
            reason = "wrong_calculation" if calculation.is_marked else "wrong_equation"
            raise SolutionError(reason, f"{calculation.expression} is not {calculation.result}")
        if not calculation.has_operation:
            solution = solution.join(index)
    if not solution.calculations:
        raise SolutionError("no_calculation", "the solution has no calculation")
    return solution


def is_confirmed(calculation: Calculation) -> bool:
    """Whether the calculator's result equals the stated one, up to rounding or truncation at its last decimal."""
    try:
        value, stated = compute_expression(calculation.expression), compute_expression(calculation.result)
    except ExpressionError:
        return False
    num_decimals = len(calculation.result.partition(".")[2])
    return value == stated or (num_decimals > 0 and abs(value - stated) < Fraction(1, 10**num_decimals))


def build_messages(question: str, solution: Solution, *, style: Style) -> list[dict[str, Any]]:
    """The whole conversation of a solution that `check_calculations` returned."""
    while style == "last" and len(solution.calculations) > 1:
        solution = solution.join(0)
    messages = protocols.build_messages(SYSTEM_PROMPT, question)
    for number, (text, calculation) in enumerate(zip(solution.texts[:-1], solution.calculations, strict=True), start=1):
        call = {"name": CALCULATOR_TOOL["function"]["name"], "arguments": {"expression": calculation.expression}}
        call_id = f"call_{number}"
        messages += [
            {
                "role": "assistant",
                "content": wrap_reasoning(text or f"{calculation.expression} ="),
                "tool_calls": [{"id": call_id, "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": calculate(calculation.expression)},
        ]
    ending = solution.texts[-1] or solution.answer
    messages.append({"role": "assistant", "content": f"{wrap_reasoning(ending)}\n\n{ANSWER_MARK} {solution.answer}"})
    return messages


def wrap_reasoning(text: str) -> str:
    return f"{THINK_OPEN}\n{text}\n{THINK_CLOSE}"


def find_rejection_reason(question: str, messages: list[dict[str, Any]], answer: str) -> str | None:
    """Why the agent's judge gives less than full marks: `invalid_format` or `invalid_answer`; None for full marks."""
    task, transcript = {"question": question, "answer": answer}, build_transcript(messages)
    if match_numeric(task, transcript) != 1.0:
        return "invalid_answer"
    results = [message["content"] for message in messages if message["role"] == "tool"]
    if score_format(task, transcript) < 1.0 or [call.result for call in transcript.calls] != results:
        return "invalid_format"
    return None


NUM_EXAMPLES = 5
"""Examples of dropped rows per reason in the report."""
FORMAT_PARTS: Mapping[str, Callable[[Mapping[str, Any], Transcript], float | None]] = {
    "exact": match_numeric,
    "format": score_format,
    "reasoning": score_reasoning,
    "conciseness": score_conciseness,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCandidate:
    """One question with its parsed solution."""

    index: int
    """Row number in its data set, from 0."""
    question: str
    text: str
    """The solution as given in the data set."""
    solution: Solution
    is_verified: bool = True
    """Whether the calculator confirms every calculation; otherwise the conversation has no tool calls."""
    paraphrase: int | None = None
    """Number of the paraphrase; None for the original question."""
    features: Mapping[str, float] = field(default_factory=dict)
    """Pass rates by column name."""

    def build_row(self, style: Style) -> dict[str, Any]:
        """The row as written to train.jsonl or eval.jsonl."""
        return {
            "question": self.question,
            "answer": self.solution.answer,
            "solution": self.text,
            "num_steps": len(self.solution.calculations),
            "source_index": self.index,
            "paraphrase": self.paraphrase,
            "is_verified": self.is_verified,
            **self.features,
            "messages": self.build_messages(style),
            "tools": [dict(tool) for tool in TOOLS],
        }

    def build_messages(self, style: Style) -> list[dict[str, Any]]:
        solution = self.solution
        while solution.calculations and not self.is_verified:
            solution = solution.join(0)
        return build_messages(self.question, solution, style=style)


@dataclass(slots=True, kw_only=True)
class DroppedRows:
    """Counts and examples of dropped rows by reason."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, reason: str, index: int, detail: str) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < NUM_EXAMPLES:
            examples.append({"source_index": index, "detail": detail})

    def to_json(self) -> dict[str, Any]:
        order = sorted(self.counts, key=lambda reason: -self.counts[reason])
        return {
            "dropped": {reason: self.counts[reason] for reason in order},
            "examples": {reason: self.examples[reason] for reason in order},
        }


def read_rows(
    rows: Sequence[Mapping[str, Any]],
    settings: PrepareSection,
    dropped: DroppedRows,
    check: Callable[[RowCandidate], RowCandidate],
) -> list[RowCandidate]:
    """The rows whose solution parses, as `check` returns them; a SolutionError drops a row."""
    candidates = []
    for index, row in enumerate(rows):
        try:
            candidates.append(check(read_row(index, row, settings)))
        except SolutionError as error:
            dropped.add(error.reason, index, str(error))
    return candidates


def check_training_row(candidate: RowCandidate, *, style: Style) -> RowCandidate:
    """The solution is confirmed by the calculator, and the agent's judge accepts the conversation."""
    candidate = replace(candidate, solution=check_calculations(candidate.solution))
    reason = find_rejection_reason(candidate.question, candidate.build_messages(style), candidate.solution.answer)
    if reason is not None:
        raise SolutionError(reason, candidate.text)
    return candidate


def check_evaluation_row(candidate: RowCandidate) -> RowCandidate:
    """Every answer that can be read; the form of the solution must not change which test questions remain."""
    try:
        return replace(candidate, solution=check_calculations(candidate.solution))
    except SolutionError:
        return replace(candidate, is_verified=False)


def read_row(index: int, row: Mapping[str, Any], settings: PrepareSection) -> RowCandidate:
    question, text = str(row[settings.question_field]).strip(), str(row[settings.answer_field]).strip()
    if not question:
        raise SolutionError("no_question", "the question is empty")
    return RowCandidate(index=index, question=question, text=text, solution=parse_solution(text))


def check_contamination(
    candidates: Sequence[RowCandidate], evaluation: Sequence[str], settings: ContaminationSection, dropped: DroppedRows
) -> tuple[list[RowCandidate], list[dict[str, Any]]]:
    """Find overlaps with the evaluation questions and apply `settings.action`; return candidates and overlaps."""
    questions = [candidate.question for candidate in candidates]
    found = find_overlaps(questions, evaluation, ngram_words=settings.ngram_words)
    overlaps: list[dict[str, Any]] = [
        {
            "source_index": candidates[overlap.train_index].index,
            "eval_index": overlap.eval_index,
            "kind": overlap.kind,
            "words": overlap.words,
        }
        for overlap in found
    ]
    if overlaps and settings.action == "error":
        first = overlaps[0]
        raise DataError(
            f"{len(overlaps)} training questions overlap with eval_data; row {first['source_index']} shares "
            f"{first['words']!r} with its row {first['eval_index']}. Fix the data, or set contamination.action=drop"
        )
    if settings.action != "drop":
        return list(candidates), overlaps
    for each in overlaps:
        dropped.add(f"contaminated_{each['kind']}", each["source_index"], f"eval row {each['eval_index']}")
    contaminated = {overlap.train_index for overlap in found}
    return [candidate for index, candidate in enumerate(candidates) if index not in contaminated], overlaps


def add_paraphrases(
    candidates: Sequence[RowCandidate], section: ParaphraseSection, *, cache_path: str
) -> tuple[list[RowCandidate], dict[str, int]]:
    """Paraphrases of the questions as new candidates with the same solution, and their counts for the report."""
    tasks = [
        Task(task_id=str(index), index=index, row={"question": candidate.question})
        for index, candidate in enumerate(candidates)
    ]
    options = section.model_dump(exclude={"model", "base_url"})
    paraphrased, metrics = paraphrase(
        tasks, field="question", model=section.model, base_url=section.base_url, cache_path=cache_path, **options
    )
    rewritten = []
    for task in paraphrased:
        _, is_variant, number = task.task_id.partition("/paraphrase-")
        if is_variant:
            source = candidates[task.index]
            rewritten.append(replace(source, question=task.row["question"], paraphrase=int(number)))
    counts = {name: int(value) for name, value in metrics.items()} | {"num_added": len(rewritten)}
    return rewritten, counts


def compute_format_report(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of the demonstrations under the parts of the agent's reward: means, and the number of fully valid rows."""
    transcripts = [build_transcript(row["messages"]) for row in rows]
    scores = {
        name: [score(row, transcript) or 0.0 for row, transcript in zip(rows, transcripts, strict=True)]
        for name, score in FORMAT_PARTS.items()
    }
    is_valid = [exact == form == 1.0 for exact, form in zip(scores["exact"], scores["format"], strict=True)]
    means = {name: round(fmean(values), 6) for name, values in scores.items()} if rows else {}
    return {"num_rows": len(rows), "num_valid": sum(is_valid), "means": means}
