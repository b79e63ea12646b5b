"""Results, the schema, concurrent and cancelled calls, lost workers, and machines without isolation."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sandboxes import KINDS, build_tool, run_as_ordinary_user, run_code
from tunesmith.config import PythonToolSection, RolloutSection
from tunesmith.engine.event_loop.clock import run_lockstep
from tunesmith.environments.protocols import read_arguments
from tunesmith.errors import ConfigError, SandboxError
from tunesmith.tools.python.call import NO_OUTPUT, shorten_text
from tunesmith.tools.python.isolation import find_installed_files, list_isolations
from tunesmith.tools.python.tool import PythonTool

HANG_S = 60
"""Far beyond what any call here takes, far below the sleeps in them."""


@pytest.fixture(scope="module", params=KINDS)
def tool(request):
    tool = build_tool(request.param, num_workers=2)
    yield tool
    tool.close()


def find_workers():
    """Workers that this process started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            is_worker = b"tunesmith.tools.python.worker" in (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and is_worker and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2"),
        ("print('a')\n'b'", "a\nb"),
        ("x = 3\nx", "3"),
        ("print(5)", "5"),
        ("[].append(1)", NO_OUTPUT),
        ("x = 1", NO_OUTPUT),
        ("", NO_OUTPUT),
        ("# only a comment", NO_OUTPUT),
        ("if True:\n    7", NO_OUTPUT),
        ("from fractions import Fraction\nFraction(1, 3)", "1/3"),
        ("print('  indented')", "  indented"),
        ("'\u00e9\u4e2d'", "\u00e9\u4e2d"),
        ("import sys\nprint('warning', file=sys.stderr)\n1", "1"),
        ("exit()", NO_OUTPUT),
        ("import sys\nprint(1)\nsys.exit(0)", "1"),
        ("__name__", "__main__"),
        ("import atexit\natexit.register(print, 'end')\n1", "1\nend"),
        ("import pickle\nclass A: pass\nlen(pickle.dumps(A())) > 0", "True"),
        ("import asyncio\nasync def f(): return 5\nasyncio.run(f())", "5"),
        ("from dataclasses import dataclass\n@dataclass\nclass A: x: int\nA(1)", "A(x=1)"),
        ("open('a.txt', 'w').write('text')\nopen('a.txt').read()", "text"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'abc'))", "3"),
        ("input()", None),
    ],
)
def test_results(tool, code, text):
    result = run_code(tool, code)
    assert result.outcome == ("error" if text is None else "ok"), result.text
    assert text is None or result.text == str(result) == text


def test_threads_are_joined():
    tool = build_tool("bubblewrap")
    code = "import threading, time\nthreading.Thread(target=lambda: [time.sleep(.05), print('late')]).start()"
    assert run_code(tool, code).text == "late"
    tool.close()


def test_errors_show_the_code(tool):
    result = run_code(tool, "print('before')\ndef f(x):\n    return 1 / x\nf(0)")
    assert result.outcome == "error"
    assert result.text.startswith('before\nTraceback (most recent call last):\n  File "<python>", line 4, in <module>')
    assert "    return 1 / x\n" in result.text and result.text.endswith("ZeroDivisionError: division by zero")
    assert "child.py" not in result.text and "snippet.py" not in result.text
    assert run_code(tool, "def f(:").text.endswith("SyntaxError: invalid syntax")
    assert run_code(tool, "import sys\nsys.exit('no')").text == "SystemExit: no"
    for code in ("a\0b", "'\ud800'", "\ud800"):
        assert run_code(tool, code).outcome == "error"


def test_calls_are_reproducible(tool):
    code = "import random\nprint(hash('a'), random.random(), list({'x', 'y', 'z'}))"
    assert run_code(tool, code) == run_code(tool, code)
    tool_again = PythonTool(tool.settings)
    assert run_code(tool_again, code) == run_code(tool, code)
    tool_again.close()


def test_long_results_lose_their_middle():
    text = shorten_text("a" * 500 + "b" * 500, 300)
    assert len(text) == 300
    assert text.startswith("aaa") and text.endswith("bbb") and "1000 characters" in text
    assert shorten_text("a" * 300, 300) == "a" * 300


def test_the_schema_names_packages_and_limits():
    tool = PythonTool(PythonToolSection(packages=("numpy",), wall_s=2.5))
    function = tool.build_tool().schema["function"]
    assert function["name"] == "python" and function["parameters"]["required"] == ["code"]
    assert "the standard library and numpy" in function["description"] and "2.5 s" in function["description"]
    assert "kept between calls" in tool.build_tool(is_session=True).schema["function"]["description"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"code": "6 * 7"}', "42"),
        ('{"code": 7}', "Error: the argument 'code' must be of type string"),
        ('{"code": "1", "timeout": 5}', "Error: there is no argument 'timeout'"),
        ("{", "Error: the argument 'code' is missing"),
        ("[" * 100_000, "Error: the argument 'code' is missing"),
        (json.dumps({"code": " " * 1_000_001}), "Error: the code is longer"),
    ],
)
def test_tool_calls_are_executed(tool, arguments, text):
    called = asyncio.run(tool.build_tool().call(read_arguments(arguments) or {}))
    assert called.text.startswith(text)


def test_more_calls_than_workers(tool):
    async def run():
        return await asyncio.gather(*(tool(f"{number} * 2") for number in range(20)))

    assert [result.text for result in asyncio.run(run())] == [str(2 * number) for number in range(20)]


def test_the_event_loop_runs_during_a_call(tool):
    async def run():
        call = asyncio.create_task(tool("import time\ntime.sleep(1000)"))
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not call.done()
        call.cancel()

    asyncio.run(run())
    assert run_code(tool, "1").text == "1"


def test_calls_on_the_loop_of_an_engine(tool):
    async def run():
        return [result.text for result in await asyncio.gather(*(tool(f"{number}") for number in range(8)))]

    assert run_lockstep(run(), RolloutSection()) == [str(number) for number in range(8)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_call_ends_at_once(kind):
    tool = build_tool(kind, num_workers=2, wall_s=2 * HANG_S)

    async def run():
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tool("import time\ntime.sleep(1000)"), 0.3)
        waiting = [asyncio.create_task(tool("import time\ntime.sleep(1000)")) for _ in range(5)]
        await asyncio.sleep(0.3)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        texts = [(await tool("6 * 7")).text for _ in range(3)]
        return texts, time.monotonic() - started

    texts, seconds = asyncio.run(run())
    tool.close()
    assert texts == ["42"] * 3
    assert seconds < HANG_S


@pytest.mark.parametrize("kind", KINDS)
def test_lost_workers_are_replaced(kind):
    """All at once, as when memory runs out."""
    others = set(find_workers())
    tool = build_tool(kind, num_workers=3)
    asyncio.run(tool.start())
    before = set(find_workers()) - others
    assert len(before) == 3
    for pid in before:
        os.killpg(pid, signal.SIGKILL)
    assert [run_code(tool, str(number)).text for number in range(3)] == ["0", "1", "2"]
    tool.close()


def test_a_call_that_loses_two_workers_is_an_error_not_a_result(tool):
    assert run_code(tool, "1").text == "1"  # it has found out which kind of isolation works

    async def run():
        call = asyncio.create_task(tool("import time\ntime.sleep(15)"))
        known = set(find_workers())
        while not call.done():
            await asyncio.sleep(0.05)
            for pid in set(find_workers()) | known:
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        return await call

    with pytest.raises(SandboxError, match="lost|cannot be started"):
        asyncio.run(run())
    assert run_code(tool, "2").text == "2"


def test_closing_ends_all_workers():
    others = set(find_workers())
    tool = build_tool("bubblewrap", num_workers=2)
    asyncio.run(tool.start())
    assert len(set(find_workers()) - others) == 2
    tool.close()
    assert not set(find_workers()) - others


def test_workers_end_with_the_process():
    build_tool("bubblewrap").close()
    code = (
        "import asyncio, os, subprocess\n"
        "from tunesmith.tools.python.tool import PythonTool\n"
        "tool = PythonTool()\nasyncio.run(tool.start())\n"
        "print(*[w._process.pid for w in tool._pool._idle], flush=True)\nos.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert pids, ended.stderr
    deadline = time.monotonic() + HANG_S
    while any(Path(f"/proc/{pid}").exists() and is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlives its process"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_packages_can_be_imported_and_others_not():
    for kind in KINDS:
        tool = build_tool(kind, packages=("numpy",))
        assert run_code(tool, "import numpy\nprint(numpy.arange(4).sum())").text == "6"
        assert "No module named" in run_code(tool, "import pydantic").text
        tool.close()


def test_a_package_that_is_not_installed():
    with pytest.raises(ConfigError, match="'no-such-package' is not installed"):
        run_code(PythonTool(PythonToolSection(packages=("no-such-package",), unsafe=True)), "1")


def test_without_isolation_the_tool_refuses(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    tool = PythonTool(PythonToolSection(isolation="bubblewrap"))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap") as caught:
        run_code(tool, "1")
    assert "unsafe=True" in str(caught.value)


def test_unsafe_runs_with_limits_only_where_isolation_is_missing(monkeypatch, caplog):
    monkeypatch.setenv("PATH", "/nowhere")
    tool = PythonTool(PythonToolSection(isolation="bubblewrap", unsafe=True, wall_s=2, num_workers=1))
    assert run_code(tool, "6 * 7").text == "42"
    assert "WITHOUT isolation" in caplog.text
    assert run_code(tool, "import time\ntime.sleep(1000)").outcome == "timeout"
    assert run_code(tool, "x = [0] * 10**10").outcome == "memory"
    assert run_code(tool, "6 * 7").text == "42"
    tool.close()


def test_isolation_comes_before_unsafe():
    kinds = list_isolations(PythonToolSection(unsafe=True))
    assert kinds[-2:] == ["seccomp", "none"]
    assert "none" not in list_isolations(PythonToolSection())


def test_seccomp_allows_one_process_only():
    with pytest.raises(SandboxError, match="max_processes=2 needs bubblewrap"):
        run_code(PythonTool(PythonToolSection(isolation="seccomp", max_processes=2)), "1")


@pytest.mark.parametrize("kind", KINDS)
def test_an_ordinary_user_has_the_same_sandbox(kind):
    codes = ["6 * 7", "open('/etc/passwd')", "import os; os.fork()", "import time; time.sleep(1000)", "1 + 1"]
    assert [result.outcome for result in run_as_ordinary_user(kind, codes, wall_s=2)] == [
        "ok", "error", "error", "timeout", "ok",
    ]  # fmt: skip


def test_no_folder_is_left_behind(monkeypatch, tmp_path):
    build_tool("seccomp").close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tool = build_tool("seccomp")
    assert run_code(tool, "import os\nos.mkdir('a', 0o300)\nos.mkdir('a/b', 0)").outcome == "ok"
    tool.close()
    assert not list(tmp_path.iterdir())
    code = "import asyncio, os\nfrom sandboxes import build_tool\ntool = build_tool('seccomp')\n"
    code += "asyncio.run(tool('1'))\nos.kill(os.getpid(), 9)"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=HANG_S, check=False)
    deadline = time.monotonic() + HANG_S
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline, "a worker whose pool was killed leaves its folder"
        time.sleep(0.02)


def test_every_file_of_the_sandbox_exists():
    """A missing one makes every isolation that binds files unavailable, and tests of it are then skipped."""
    files = find_installed_files(())
    assert files.importable
    assert [path for path in files.importable.values() if not Path(path).exists()] == []
