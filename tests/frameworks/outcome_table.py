"""Writes the table of docs/frameworks.md from results/frameworks.json: `python tests/frameworks/outcome_table.py`."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTCOMES = ROOT / "results" / "frameworks.json"
PAGE = ROOT / "docs" / "frameworks.md"
START = "<!-- written by tests/frameworks/outcome_table.py -->\n"
END = "<!-- end of the table -->\n"
HEADER = """| framework | package | turns | branches | tokens sampled | tokens trained | outcome |
|---|---|---|---|---|---|---|
"""
MAX_ERROR_CHARS = 160


def format_outcomes(outcomes: list[dict]) -> str:
    """The table in Markdown, a row for each framework."""
    return HEADER + "".join(_format_row(outcome) for outcome in outcomes)


def _format_row(outcome: dict) -> str:
    numbers = [outcome.get(key) for key in ("turns", "branches", "sampled_tokens", "trained_tokens")]
    error = (outcome.get("error") or "").strip().splitlines()
    text = "passed" if outcome["ok"] else f"failed: {error[-1][:MAX_ERROR_CHARS].replace('|', ' ') if error else ''}"
    cells = [outcome["name"], outcome["packages"][0], *("" if each is None else str(each) for each in numbers), text]
    return f"| {' | '.join(cells)} |\n"


def read_table(page: str) -> str:
    """The table of the page, between its two comments."""
    return page.split(START)[1].split(END)[0]


def main() -> None:
    page = PAGE.read_text()
    PAGE.write_text(page.replace(START + read_table(page), START + format_outcomes(json.loads(OUTCOMES.read_text()))))


if __name__ == "__main__":
    main()
