"""The modules of the page as one script, so that a page is few requests and a report is one file.

The modules use a small part of the language's imports and exports, which this file replaces as text: named imports from
files of the same folder at the top, and `export` before a function or a const.
"""

from __future__ import annotations

import re
from pathlib import Path

STATIC = Path(__file__).parent / "static"
ENTRY = "app.js"
IMPORT = re.compile(r'^import \{ ([^}]*) \} from "\./([^"]+)";\n', re.MULTILINE)
EXPORT = re.compile(r"^export (async function|function|const) (\w+)", re.MULTILINE)
VENDOR_EXPORTS = re.compile(r"export\{([^}]*)\};?\s*$")


def bundle_modules() -> str:
    """The modules as one script: each a function that returns its exports, after those that it imports."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for _, imported in IMPORT.findall(read(name)):
                visit(imported)
            order.append(name)

    visit(ENTRY)
    return "\n".join(["const modules = {};", *(wrap_module(name) for name in order)])


def wrap_module(name: str) -> str:
    text = read(name)
    if vendor := VENDOR_EXPORTS.search(text):
        pairs = (pair.split(" as ") for pair in vendor[1].split(","))
        exports = ",".join(f"{outer}:{inner}" for inner, outer in pairs)
        body = text[: vendor.start()]
    else:
        exports = ",".join(match[1] for match in EXPORT.findall(text))
        body = IMPORT.sub(
            lambda match: f'const {{ {match[1]} }} = modules["{match[2]}"];\n', EXPORT.sub(r"\1 \2", text)
        )
    return f'modules["{name}"] = (() => {{\n{body}\nreturn {{{exports}}};\n}})();'


def read(name: str) -> str:
    text = (STATIC / name).read_text(encoding="utf-8")
    assert "</script" not in text and "<!--" not in text.replace('"!--"', ""), f"{name} ends the script it is in"
    return text
