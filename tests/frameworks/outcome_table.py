"""Writes the tables of docs/frameworks.md from results/endpoint/: `python tests/frameworks/outcome_table.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cases import FEATURES

ROOT = Path(__file__).parents[2]
OUTCOMES = ROOT / "results" / "endpoint" / "frameworks.json"
PAGE = ROOT / "docs" / "frameworks.md"
OUTCOMES_START = "<!-- outcomes, written by tests/frameworks/outcome_table.py -->\n"
FEATURES_START = "<!-- features, written by tests/frameworks/outcome_table.py -->\n"
END = "<!-- end of the table -->\n"
COLUMNS = (
    "framework",
    "package",
    "turns",
    "branches",
    "tokens, one sample a call",
    "tokens, merged",
    "saved",
    "outcome",
)
MAX_ERROR_CHARS = 160


def format_outcomes(outcomes: list[dict]) -> str:
    """The table of the recipes in Markdown, a row for each framework."""
    return _format_header(COLUMNS) + "".join(_format_row(_list_cells(outcome)) for outcome in outcomes)


def format_features(outcomes: list[dict]) -> str:
    """The table of features in Markdown: branches of a trajectory where an agent passed, or why there is none."""
    rows = (
        [outcome["name"], *(_describe_case((outcome.get("features") or {}).get(feature)) for feature in FEATURES)]
        for outcome in outcomes
    )
    return _format_header(("framework", *FEATURES.values())) + "".join(map(_format_row, rows))


def _describe_case(case: dict | None) -> str:
    if case is None:
        return "not run"
    if "absent" in case:
        return case["absent"] or "-"
    return f"pass, {case['branches']}" if case["ok"] else _describe_error(case)


def _list_cells(outcome: dict) -> list[str]:
    numbers = [outcome.get(key) for key in ("turns", "branches", "call_tokens", "merged_tokens")]
    saved = f"{1 - numbers[3] / numbers[2]:.0%}" if numbers[2] else ""
    cells = ["" if each is None else f"{each:,}" for each in numbers]
    return [
        outcome["name"],
        outcome["packages"][0],
        *cells,
        saved,
        "passed" if outcome["ok"] else _describe_error(outcome),
    ]


def _describe_error(outcome: dict) -> str:
    error = (outcome.get("error") or "").strip().splitlines()
    return f"failed: {error[-1][:MAX_ERROR_CHARS].replace('|', ' ') if error else ''}"


def _format_header(columns: Sequence[str]) -> str:
    return _format_row(columns) + "|" + "---|" * len(columns) + "\n"


def _format_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def read_table(page: str, start: str) -> str:
    """The table of the page between two comments."""
    return page.split(start)[1].split(END)[0]


def write_outcomes(outcomes: list[dict]) -> None:
    """Replace the recorded outcomes, then the tables of the page."""
    _replace_text(OUTCOMES, json.dumps(outcomes, indent=1) + "\n")
    main()


def _replace_text(path: Path, text: str) -> None:
    """Write a file that an interruption leaves either as it was or complete."""
    written = path.with_name(f".{path.name}.tmp")
    written.write_text(text)
    written.replace(path)


def main() -> None:
    page, outcomes = PAGE.read_text(), json.loads(OUTCOMES.read_text())
    for start, table in ((OUTCOMES_START, format_outcomes(outcomes)), (FEATURES_START, format_features(outcomes))):
        page = page.replace(start + read_table(page, start), start + table)
    _replace_text(PAGE, page)


if __name__ == "__main__":
    main()
