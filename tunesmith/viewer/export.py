"""One self-contained HTML file with the page, its scripts and a selection of answers, within a size limit.

Answers are added in order of importance until the limit is reached; the report says what it leaves out. Its scripts are
allowed by their hashes alone, so nothing else in the file can run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tunesmith.errors import StorageError, TunesmithError
from tunesmith.storage import save_text
from tunesmith.viewer.answers.evaluations import PAGE_ROWS, list_answers, list_evaluations
from tunesmith.viewer.answers.table import Answers, clean
from tunesmith.viewer.bundle import bundle_modules, read
from tunesmith.viewer.reading.run import Run

MAX_STEPS = 40
"""Steps of a run of which the groups are listed, spread evenly; the rollouts are those of the last ones first."""
MAX_GROUPS = 200
MAX_PAGES = 20
MAX_MISSING = 20
"""Answers that do not fit until the rest of their kind is left out too."""
OF_EACH_RUN = {
    "config": "settings",
    "diagnosis": "findings of the doctor",
    "failures": "lists of failures",
    "tasks": "lists of tasks",
}
Query = tuple[str, Mapping[str, str]]


def export_report(runs: Sequence[Run], out: str | Path, *, max_bytes: float) -> str:
    """Write the report; returns a line about its size and what it leaves out."""
    path = Path(out).expanduser()
    shell = build_page("")
    if len(shell) >= max_bytes:
        raise StorageError(f"a report takes at least {len(shell) / 2**20:.1f} MB; raise --max-mb")
    budget = max_bytes - len(shell) - 4096
    answers, left_out = collect_answers(Answers(list(runs)), budget=budget)
    report = {"date": f"{datetime.now():%Y-%m-%d %H:%M}", "left_out": left_out, "answers": answers}
    page = build_page(escape_json(json.dumps(report, separators=(",", ":"))))
    save_text(path, page)
    missing = f"; left out: {'; '.join(left_out)}" if left_out else ""
    return f"{path}: {len(page.encode()) / 2**20:.1f} MB{missing}"


def collect_answers(answers: Answers, *, budget: float) -> tuple[dict[str, Any], list[str]]:
    """Answers by URL, most important first, as many as fit; and what is missing, by kind."""
    found: dict[str, Any] = {}
    left_out = ["searches, and comparisons of rollouts that were not chosen before: they need the run folder"]
    for kind, queries in list_kinds(answers):
        num_missing = 0
        for path, params in queries:
            url = f"{path}?{urlencode(params)}" if params else path
            if url in found:
                continue
            try:
                answer = clean(answers.get(path, params))
            except TunesmithError:
                continue  # rollouts that were never written, for example of a step in a merged file's range
            size = len(escape_json(json.dumps(answer, separators=(",", ":")))) + len(url) + 8
            if size <= budget:
                found[url] = answer
                budget -= size
            elif (num_missing := num_missing + 1) > MAX_MISSING:
                break
        if num_missing:
            number = "most" if num_missing > MAX_MISSING else num_missing
            left_out.append(f"{number} {kind}: the limit on the file's size is reached")
    return found, left_out + list_unchosen(answers.runs)


def list_kinds(answers: Answers) -> Iterator[tuple[str, Iterable[Query]]]:
    """Queries by kind, most important first."""
    runs = answers.runs
    yield "descriptions of runs", [("runs", {}), ("evaluations", {})]
    yield "metrics", [("metric", {"name": name}) for name in answers.get("runs", {})["metrics"]]
    for path, kind in OF_EACH_RUN.items():
        yield kind, [(f"{path}/{number}", {}) for number in range(len(runs))]
    yield "pages of evaluations", list_evaluation_pages(runs)
    steps = list_chosen_steps(runs)
    yield "lists of groups", [(f"step/{number}/{step}", {}) for number, step in steps]
    yield "choices of selectors", [(f"selection/{number}/{step}", {}) for number, step in steps]
    yield "rollouts of failures", iter_failed_groups(answers)
    yield (
        "groups with their rollouts",
        (
            query
            for number, step in steps
            for group in sorted({*runs[number].index.find_step(step)["group"].tolist()})[:MAX_GROUPS]
            for query in iter_group(runs, number, step, group)
        ),
    )


def list_chosen_steps(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Run and step of at most `MAX_STEPS` steps of each run, first and last among them; newest of all runs first."""
    chosen = []
    for number, run in enumerate(runs):
        steps = run.rollouts.list_steps()[::-1]
        size = min(len(steps), MAX_STEPS)
        kept = [steps[round(rank * (len(steps) - 1) / max(size - 1, 1))] for rank in range(size)]
        chosen += [(rank, number, step) for rank, step in enumerate(kept)]
    return [(number, step) for _, number, step in sorted(chosen)]


def iter_failed_groups(answers: Answers) -> Iterator[Query]:
    for number in range(len(answers.runs)):
        for cause in answers.get(f"failures/{number}", {})["causes"]:
            yield from iter_group(answers.runs, number, cause["example"]["step"], cause["example"]["group"])


def iter_group(runs: Sequence[Run], number: int, step: int, group: int) -> Iterator[Query]:
    """A group, its trie and its rollouts."""
    rows = runs[number].index.find_step(step)
    yield f"group/{number}/{step}/{group}", {}
    yield f"trie/{number}/{step}/{group}", {}
    for index in rows["run"][rows["group"] == group].tolist():
        yield f"rollout/{number}/{step}/{group}/{index}", {}


def list_evaluation_pages(runs: Sequence[Run]) -> Iterator[Query]:
    """The pages of each set with the columns that are shown first."""
    for name, columns in list_evaluations(runs)["sets"].items():
        shown = [column for column in columns if column["is_first_shown"]]
        query = {"set": name, "columns": ",".join(column["key"] for column in shown)}
        num_pages = -(-list_answers(runs, query)["num_rows"] // PAGE_ROWS)
        for page in range(min(num_pages, MAX_PAGES)):
            yield "answers", query | ({"page": str(page)} if page else {})


def list_unchosen(runs: Sequence[Run]) -> list[str]:
    """What is left out of every report of these runs."""
    counts = [(run.name, len(run.rollouts.list_steps())) for run in runs]
    lines = [f"{count - MAX_STEPS} of {count} steps of {name}" for name, count in counts if count > MAX_STEPS]
    sets = list_evaluations(runs)["sets"]
    if any(len(columns) > 2 for columns in sets.values()):
        lines.append("evaluations between the first and the last of a set")
    if any(column["num_tasks"] > MAX_PAGES * PAGE_ROWS for columns in sets.values() for column in columns):
        lines.append(f"evaluation questions after the first {MAX_PAGES * PAGE_ROWS}")
    return lines


def build_page(report: str) -> str:
    """The page with styles and scripts inside it; `report` is the JSON of its answers."""
    scripts = [read("vendor/uplot.js"), bundle_modules()]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    styles = "\n".join(read(name) for name in ("vendor/uplot.css", "style.css", "rollout.css"))
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>tunesmith report</title>\n'
        f'<style>\n{styles}\n</style>\n</head>\n<body><div id="app"></div>\n'
        f'<script type="application/json" id="report">{report}</script>\n'
        + "\n".join(f"<script>{script}</script>" for script in scripts)
        + "\n</body>\n</html>\n"
    )


def escape_json(text: str) -> str:
    """JSON that cannot end the element it is in, whatever its strings hold."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
