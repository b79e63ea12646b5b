"""MkDocs hook: files of the repository that a page links to (code, recipes, results) become part of the site.

Pages link to `../tunesmith/loop.py` or `../results/x.png`, as GitHub needs it. Such files are outside of the docs
folder and would be broken links on the site. Images are copied, Markdown is rendered, other text files become a page
with their content, a notebook its cells, a folder its README or a list of its files. Links are rewritten to these
pages.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^\s*(```|~~~)")
COPIED = {".png", ".svg", ".gz", ".pdf"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}
FOLDER = "repository"
"""Folder of the site with the pages of repository files."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page or a copy for every repository file that a page, or an added page, links to."""
    root = Path(config.config_file_path).parent
    waiting = [file for file in files.documentation_pages() if file.abs_src_path]
    texts = {file.src_uri: Path(str(file.abs_src_path)).read_text(encoding="utf-8") for file in waiting}
    while texts:
        src_uri, text = texts.popitem()
        for target in iter_targets(text):
            path = find_repository_path(src_uri, target, root)
            if path is None or files.get_file_from_path(name_page(path)) is not None:
                continue
            file = build_file(path, config)
            files.append(file)
            if path.suffix == ".md" or path.is_dir():
                texts[file.src_uri] = file.content_string
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to repository files; keep the pages of these files out of the search."""
    root = Path(config.config_file_path).parent
    if page.file.src_uri.startswith(f"{FOLDER}/"):
        page.meta["search"] = {"exclude": True}

    def rewrite(match: re.Match[str]) -> str:
        target, hash_, anchor = match[2].partition("#")
        path = find_repository_path(page.file.src_uri, target, root)
        if path is None:
            return match[0]
        relative = posixpath.relpath(name_page(path), posixpath.dirname(page.file.src_uri) or ".")
        return f"{match[1]}{relative}{hash_}{anchor}{match[3]}"

    return map_prose(markdown, lambda line: LINK.sub(rewrite, line))


def map_prose(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the lines outside of fenced code."""
    lines, is_code = [], False
    for line in text.split("\n"):
        is_fence = FENCE.match(line) is not None
        is_code ^= is_fence
        lines.append(line if is_code or is_fence else change(line))
    return "\n".join(lines)


def iter_targets(text: str) -> Iterator[str]:
    """Targets of the links of a page, without anchors."""
    found: list[str] = []
    map_prose(text, lambda line: found.extend(match[2] for match in LINK.finditer(line)) or line)
    yield from (target.partition("#")[0] for target in found)


def find_repository_path(src_uri: str, target: str, root: Path) -> Path | None:
    """The path in the repository that a page's link leads to; None for pages of the docs folder and for the web."""
    if not target or re.match(r"[a-z]+:", target):
        return None
    is_repository_page = src_uri.startswith(f"{FOLDER}/")
    folder = posixpath.dirname(src_uri.removeprefix(f"{FOLDER}/") if is_repository_page else f"docs/{src_uri}")
    path = Path(posixpath.normpath(posixpath.join(folder, target)))
    if path.parts[0] == ".." or not (root / path).exists():
        return None
    return root / path if is_repository_page or path.parts[0] != "docs" else None


def name_page(path: Path) -> str:
    """The page of a repository path, relative to the docs folder."""
    relative = path.relative_to(find_root()).as_posix()
    if relative.startswith("docs/"):
        return relative.removeprefix("docs/")
    if path.is_dir():
        return f"{FOLDER}/{relative}/README.md"
    return f"{FOLDER}/{relative}" if path.suffix in COPIED | {".md"} else f"{FOLDER}/{relative}.md"


def find_root() -> Path:
    return Path(__file__).parents[2]


def build_file(path: Path, config: MkDocsConfig) -> File:
    name = name_page(path)
    if path.suffix in COPIED:
        return File.generated(config, name, abs_src_path=str(path))
    if path.is_dir():
        return File.generated(config, name, content=render_folder(path))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return File.generated(config, name, content=text)
    if path.suffix == ".ipynb":
        return File.generated(config, name, content=render_notebook(text))
    relative = path.relative_to(find_root()).as_posix()
    fence = "`" * 4
    return File.generated(
        config, name, content=f"# {relative}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"
    )


def render_notebook(text: str) -> str:
    """The cells as Markdown."""
    cells = ((cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"])
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells)


def render_folder(path: Path) -> str:
    """The README of a folder, or a list of its files."""
    readme = path / "README.md"
    if readme.exists():
        return readme.read_text(encoding="utf-8")
    names = sorted(f"{each.name}/" if each.is_dir() else each.name for each in path.iterdir())
    listed = "\n".join(f"- `{name}`" for name in names if not name.startswith((".", "__")))
    return f"# {path.relative_to(find_root()).as_posix()}\n\n{listed}\n"
