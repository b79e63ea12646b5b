"""Pages at the root, in docs/, benchmarks/ and recipes/: fenced snippets with their directives, links, anchors.

A directive is an HTML comment on the lines above a fence, invisible on GitHub and on the site:

    <!-- file: agent.py -->                  written under this name to the page's folder, for the snippets below it
    <!-- run -->                             executed in the page's folder
    <!-- run with: "A" -> "B"; 'C' -> 'D' -->  the same, with these replacements, so that it takes seconds
    <!-- run set: KEY=VALUE KEY=VALUE -->   executed as it is, with these in the environment variable TUNESMITH_SET
    <!-- config: sft -->                     the command whose file it is, where the keys do not say
    <!-- not run: REASON -->                 only checked for syntax
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
]

FENCE = re.compile(r"^(?P<indent> *)(?P<marks>```+)(?P<language>[\w+-]*)\s*$")
DIRECTIVE = re.compile(r"^<!-- (?P<name>file|run|run with|run set|config|not run)(?:: (?P<value>.*?))? -->$")
REPLACEMENT = re.compile(r"""(["'])(?P<old>.*?)\1 -> (["'])(?P<new>.*?)\3""")
HEADING = re.compile(r"^(#{1,6}) (.*)$")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A fenced block of a page."""

    page: Path
    line: int
    """Line of the opening fence, from 1."""
    language: str
    """As written; empty without one."""
    text: str
    directives: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def is_run(self) -> bool:
        return bool({"run", "run with", "run set"} & self.directives.keys())

    @property
    def replaced_text(self) -> str:
        """The text with the replacements of `run with`, each of which must occur in it."""
        text = self.text
        for each in REPLACEMENT.finditer(self.directives.get("run with", "")):
            assert each["old"] in text, f"{self.place}: `run with` replaces {each['old']!r}, which does not occur"
            text = text.replace(each["old"], each["new"])
        return text


@cache
def read_lines(page: Path) -> tuple[str, ...]:
    return tuple(page.read_text(encoding="utf-8").split("\n"))


@cache
def find_snippets(page: Path) -> tuple[Snippet, ...]:
    """The fenced blocks of a page in order."""
    found: list[Snippet] = []
    lines = read_lines(page)
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        if opening is None:
            number += 1
            continue
        end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == opening["marks"])
        indent = len(opening["indent"])
        text = "".join(f"{line[indent:]}\n" for line in lines[number + 1 : end])
        found.append(
            Snippet(
                page=page,
                line=number + 1,
                language=opening["language"],
                text=text,
                directives=read_directives(lines, number),
            )
        )
        number = end + 1
    return tuple(found)


def read_directives(lines: tuple[str, ...], fence: int) -> dict[str, str]:
    """Directives on the lines directly above a fence; empty lines may be between."""
    directives: dict[str, str] = {}
    for line in reversed(lines[:fence]):
        match = DIRECTIVE.match(line.strip())
        if match is not None:
            directives[match["name"]] = match["value"] or ""
        elif line.strip():
            break
    return directives


def iter_prose(page: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and lines outside of fenced blocks."""
    fence = ""
    for number, line in enumerate(read_lines(page), start=1):
        marks = line.strip()
        if fence:
            fence = "" if marks == fence else fence
        elif (opening := FENCE.match(line)) is not None:
            fence = opening["marks"]
        else:
            yield number, line


def find_anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub names them."""
    anchors: set[str] = set()
    for _, line in iter_prose(page):
        heading = HEADING.match(line)
        if heading is not None:
            name = re.sub(r"[^\w\- ]", "", heading[2].strip().lower().replace("`", "")).replace(" ", "-")
            anchors.add(name if name not in anchors else f"{name}-{sum(a.startswith(name) for a in anchors)}")
    return anchors


def iter_paragraphs(page: Path) -> Iterator[tuple[int, str]]:
    """First line numbers and texts of paragraphs, list items, headings and rows of tables, each as one line."""
    first, parts = 0, list[str]()
    for number, line in iter_prose(page):
        is_start = not line.strip() or re.match(r"\s*([-|#]|\d+\. )", line) is not None
        if parts and (is_start or number != first + len(parts)):
            yield first, " ".join(parts)
            parts = []
        if line.strip():
            first = first if parts else number
            parts.append(line.strip())
    if parts:
        yield first, " ".join(parts)


def iter_links(page: Path) -> Iterator[tuple[int, str]]:
    """Line numbers of paragraphs, and the targets of their links."""
    for number, text in iter_paragraphs(page):
        for match in LINK.finditer(text):
            yield number, match[1]


def iter_inline_code(page: Path) -> Iterator[tuple[int, str]]:
    """Line numbers of paragraphs, and their inline code."""
    for number, text in iter_paragraphs(page):
        for match in INLINE_CODE.finditer(text):
            yield number, match[1]
