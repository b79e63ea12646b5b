"""Python tools under each kind of isolation; tests are skipped with a reason where one is not available."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tunesmith.config import PythonToolSection
from tunesmith.errors import SandboxError
from tunesmith.tools.python.result import PythonResult
from tunesmith.tools.python.tool import PythonTool

KINDS = ("bubblewrap", "seccomp")

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
        pytest.skip(reason)


def build_tool(kind: str, **settings: Any) -> PythonTool:
    require_isolation(kind)
    return PythonTool(PythonToolSection(isolation=kind, **{"num_workers": 1, "wall_s": 60, **settings}))


def run_code(tool: PythonTool, code: str) -> PythonResult:
    return asyncio.run(tool(code))
