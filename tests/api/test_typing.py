"""What a type checker says about user programs: `mypy --strict` accepts correct ones and names wrong functions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
CONFIG = """
[mypy]
strict = True
# errors within the package are found by `make lint`; users do not see them in an installed package
follow_imports = silent

[mypy-{libraries}]
# following them takes a minute
follow_imports = skip
ignore_missing_imports = True
"""
LIBRARIES = (
    "agentscope", "datasets", "httpx", "huggingface_hub", "jinja2", "numpy", "omegaconf", "openai", "pandas", "peft",
    "pyarrow", "rich", "safetensors", "starlette", "tokenizers", "torch", "transformers", "typer", "uvicorn", "yaml",
)  # fmt: skip


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, dict[int, str]]:
    """Program -> line -> error."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "mypy.ini").write_text(CONFIG.format(libraries=",".join(f"{name}.*" for name in LIBRARIES)))
    programs = sorted(str(path) for path in PROGRAMS.glob("*.py"))
    options = ["--config-file", "mypy.ini", "--cache-dir", "cache", "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *options, *programs]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, dict[int, str]] = {}
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"(?P<path>.*\.py):(?P<line>\d+): error: (?P<text>.*)", line)
        assert match is not None, line
        found.setdefault(Path(match["path"]).stem, {})[int(match["line"])] = match["text"]
    return found


def test_a_correct_program_has_no_errors_under_strict(errors):
    assert errors.get("correct", {}) == {}


def test_every_wrong_line_and_no_other_has_its_error(errors):
    expected = {}
    for number, line in enumerate((PROGRAMS / "wrong.py").read_text().splitlines(), start=1):
        _, marker, text = line.partition("  # error: ")
        if marker:
            expected[number] = text
    assert errors["wrong"].keys() == expected.keys()
    for number, text in expected.items():
        assert text in errors["wrong"][number]


def test_the_package_is_marked_as_typed():
    assert (ROOT / "tunesmith" / "py.typed").is_file()
