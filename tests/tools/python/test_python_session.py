"""A session keeps variables and files, survives errors and time limits, and can be forked by running its code again."""

from __future__ import annotations

import asyncio

import pytest

from sandboxes import KINDS, build_tool, require_isolation
from tunesmith.config.environment import ToolSection
from tunesmith.environments.toolbox import Toolbox
from tunesmith.environments.transcript import Segment
from tunesmith.errors import SandboxError
from tunesmith.runs.load_function import load_tools
from tunesmith.tools.python.call import RESTARTED, STATE_LOST


@pytest.fixture(params=KINDS)
def tool(request):
    tool = build_tool(request.param)
    yield tool
    tool.close()


@pytest.fixture(params=KINDS)
def quick_tool(request):
    tool = build_tool(request.param, wall_s=2)
    yield tool
    tool.close()


def run_all(tool, *codes):
    async def run():
        async with tool.session() as session:
            return [await session(code) for code in codes]

    return asyncio.run(run())


def test_variables_functions_and_files_stay(tool):
    results = run_all(
        tool, "x = 5", "def f(n): return n * x", "open('a', 'w').write('text')", "f(2)", "open('a').read()",
        "1 / 0", "x", "import math as m", "m.floor(2.5)",
    )  # fmt: skip
    assert [result.text for result in results if result.outcome == "ok"][1:] == [
        results[1].text, "4", "10", "text", "5", results[7].text, "2",
    ]  # fmt: skip
    assert results[5].outcome == "error" and "<python 6>" in results[5].text


def test_sessions_do_not_share_variables(tool):
    async def run():
        async with tool.session() as one, tool.session() as other:
            await asyncio.gather(one("x = 1"), other("x = 2"))
            return (await one("x")).text, (await other("x")).text, (await tool("'x' in globals()")).text

    assert asyncio.run(run()) == ("1", "2", "False")


def test_variables_survive_the_time_limit(quick_tool):
    results = run_all(quick_tool, "x = 5", "while True: pass", "x")
    assert [result.outcome for result in results] == ["ok", "timeout", "ok"]
    assert results[2].text == "5" and not results[1].is_state_lost


@pytest.mark.parametrize(
    "code",
    [
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: signal.pause()",
        "import os\nos._exit(0)",
        "while True: print('x' * 1000)",
        "import ctypes\nctypes.string_at(0)",
    ],
)
def test_a_lost_state_is_reported_and_the_session_works(quick_tool, code):
    results = run_all(quick_tool, "x = 5", code, "x", "2 + 2")
    assert results[1].is_state_lost and results[1].text.endswith(STATE_LOST)
    assert "NameError" in results[2].text and results[3].text == "4"


def test_each_call_has_its_own_cpu_time():
    tool = build_tool("bubblewrap", cpu_s=1)
    busy = "import time\nend = time.process_time() + .7\nwhile time.process_time() < end: pass\n1"
    results = run_all(tool, busy, busy, "while True: pass", "1")
    assert [result.outcome for result in results] == ["ok", "ok", "timeout", "ok"]
    assert "CpuTimeError" in results[2].text and not results[2].is_state_lost
    tool.close()


def test_a_fork_has_the_same_state_and_goes_its_own_way(tool):
    async def run():
        async with tool.session() as session:
            for code in ("x = [1]", "import random\nx.append(random.random())\nx", "1 / 0"):
                await session(code)
            async with await session.fork() as forked:
                same = (await session("x")).text == (await forked("x")).text
                await forked("x.clear()")
                return same, (await session("len(x)")).text, (await forked("len(x)")).text

    assert asyncio.run(run()) == (True, "2", "0")


def test_a_session_that_depends_on_time_is_not_forked(quick_tool):
    async def run(code):
        async with quick_tool.session() as session:
            await session(code)
            await session.fork()

    with pytest.raises(SandboxError, match="call 1 gave another result"):
        asyncio.run(run("import time\ntime.time_ns()"))
    with pytest.raises(SandboxError, match="time limit"):
        asyncio.run(run("import time\ntime.sleep(1000)"))


def test_a_cancelled_call_restarts_the_session_and_the_next_result_says_so(tool):
    async def run():
        async with tool.session() as session:
            await session("x = 5")
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(session("import time\ntime.sleep(100)"), 0.3)
            results = [await session("y = 1\n'x' in globals()"), await session("y")]
            async with await session.fork() as forked:
                return results, (await forked("y")).text

    (first, second), text = asyncio.run(run())
    assert first.text == f"{RESTARTED}\nFalse" and not first.is_state_lost
    assert (second.text, text) == ("1", "1")


def test_a_session_is_restarted_when_its_call_is_cancelled_as_it_ends(tool):
    async def run():
        async with tool.session() as session:
            waiting = asyncio.create_task(session("x = 5"))
            await asyncio.sleep(0)
            session._threads.submit(int).result(60)  # its thread has ended the call, which this one does not see
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            return (await session("'x' in globals()")).text

    assert asyncio.run(run()) == f"{RESTARTED}\nFalse"


def test_a_time_limit_of_the_tool_is_an_observation_and_the_next_call_works():
    require_isolation("seccomp")
    section = ToolSection(
        tool="python", is_session=True, timeout_s=1, settings={"isolation": "seccomp", "num_workers": 1, "wall_s": 60}
    )

    async def run(*codes):
        (tool,) = load_tools(section)
        async with Toolbox(tools={"python": tool}, max_calls=9, max_result_chars=1000) as box:
            calls = [Segment(kind="call", text="", tool="python", arguments={"code": code}) for code in codes]
            return [(each.result, each.failure) for each in await box.run(calls)]

    assert asyncio.run(run("x = 1\nx", "import time\ntime.sleep(60)", "print('x' in globals())", "2 + 2")) == [
        ("1", ""),
        ("Error: python took longer than 1 s and was stopped.", "timeout"),
        (f"{RESTARTED}\nFalse", ""),
        ("4", ""),
    ]


def test_a_session_has_the_limit_of_code_of_stateless_calls(tool):
    async def call():
        built = tool.build_tool(is_session=True)
        async with built.open_session() as run:
            return await built.call({"code": "#" * 1_000_001}, run=run)

    assert asyncio.run(call()).text.startswith("Error: the code is longer than 1000000 characters")


def test_a_closed_session_refuses_calls(tool):
    async def run():
        session = tool.session()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session("import time\ntime.sleep(100)"), 0.3)
        session.close()
        with pytest.raises(SandboxError, match="closed"):
            await session("1")
        session.close()

    asyncio.run(run())


def test_the_process_of_a_session_ends_with_it():
    tool = build_tool("bubblewrap")

    async def run():
        session = tool.session()
        await session("1")
        process = session._worker._process
        session.close()
        session.close()
        return await asyncio.to_thread(process.wait, 60)

    assert asyncio.run(run()) == -9
    tool.close()
