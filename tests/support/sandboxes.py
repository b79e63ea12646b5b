"""Python tools under each kind of isolation; tests are skipped with a reason where one is not available."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conditions import skip_without
from tunesmith.config import PythonToolSection
from tunesmith.errors import SandboxError
from tunesmith.tools.python.call import PythonResult
from tunesmith.tools.python.isolation import is_readable_by_others
from tunesmith.tools.python.tool import PythonTool

KINDS = ("bubblewrap", "seccomp")

PROGRAM = """
import asyncio, dataclasses, json, os, sys
os.setgroups([]); os.setresgid(*[65534] * 3); os.setresuid(*[65534] * 3)
from tunesmith.config import PythonToolSection
from tunesmith.tools.python.tool import PythonTool
kind, codes, settings = json.load(sys.stdin)
async def main():
    async with PythonTool(PythonToolSection(isolation=kind, num_workers=1, **settings)) as tool:
        return [dataclasses.asdict(await tool(code)) for code in codes]
print(json.dumps(asyncio.run(main())))
"""

_reasons: dict[str, str | None] = {}


def require_isolation(kind: str) -> None:
    """Skip the test if this machine has no such isolation."""
    if kind not in _reasons:
        tool = PythonTool(PythonToolSection(isolation=kind, num_workers=1))
        try:
            asyncio.run(tool.start())
            _reasons[kind] = None
        except SandboxError as error:
            _reasons[kind] = f"no {kind} sandbox on this machine: {str(error).splitlines()[-1].strip()}"
        tool.close()
    if (reason := _reasons[kind]) is not None:
        skip_without(kind, reason)


def build_tool(kind: str, **settings: Any) -> PythonTool:
    require_isolation(kind)
    return PythonTool(PythonToolSection(isolation=kind, **{"num_workers": 1, "wall_s": 60, **settings}))


def run_code(tool: PythonTool, code: str) -> PythonResult:
    return asyncio.run(tool(code))


def find_python_of_others() -> tuple[str, list[str]]:
    """An interpreter that an ordinary user may execute, and the packages of this one."""
    names = [Path(sys.executable).resolve(), Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")]
    packages = [str(Path(pytest.__file__).parent.parent), str(Path(__file__).parents[2])]
    if os.geteuid() != 0:
        pytest.skip("needs root to become an ordinary user")
    for name in names:
        if name.exists() and all(is_readable_by_others(str(path)) for path in (name, *packages)):
            return str(name), packages
    pytest.skip("no interpreter that an ordinary user can execute")


def run_as_ordinary_user(kind: str, codes: list[str], **settings: object) -> list[PythonResult]:
    """The results of calls of the Python tool, in a process of the user nobody."""
    require_isolation(kind)
    python, packages = find_python_of_others()
    environment = {"PYTHONPATH": ":".join(packages), "PATH": os.environ["PATH"]}
    ended = subprocess.run(
        [python, "-c", PROGRAM], env=environment, cwd="/", input=json.dumps([kind, codes, settings]),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return [PythonResult(**result) for result in json.loads(ended.stdout)]
