"""MCP servers as tools: servers of the official package over stdio and HTTP, and others that break the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.server
import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from agents import TOKENIZER
from single_run import TASK, build_service

from free_ports import find_free_port
from tunesmith.config import EnvironmentSection
from tunesmith.environments import Environment, tool_agent
from tunesmith.environments.toolbox import Toolbox
from tunesmith.errors import ConfigError, ServerLostError, ToolUnavailableError
from tunesmith.rollout.open_sessions import count_open_sessions
from tunesmith.rollout.runner import Agent, run_trajectory
from tunesmith.runs.load_config import build_section
from tunesmith.runs.load_function import load_environment
from tunesmith.tools.mcp import load_mcp_tools
from tunesmith.types import JudgeOutput, Trajectory, WorkflowOutput

pytest.importorskip("mcp")

PROGRAM = [sys.executable, str(Path(__file__).parents[1] / "support" / "mcp_servers.py")]
FAKE = """
import json, sys
pages, version = json.loads(sys.argv[1]), sys.argv[2]
print("Welcome!", flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "initialize":
        result = {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "fake", "version": "1"}}
    elif message["method"] == "tools/list":
        page = int(message["params"].get("cursor", 0))
        result = {"tools": pages[page]} | ({"nextCursor": str(page + 1)} if page + 1 < len(pages) else {})
        print(json.dumps({"jsonrpc": "2.0", "id": "a", "method": "ping"}), flush=True)
        assert json.loads(sys.stdin.readline()) == {"jsonrpc": "2.0", "id": "a", "result": {}}
        print(json.dumps({"jsonrpc": "2.0", "id": "b", "method": "roots/list"}), flush=True)
        assert json.loads(sys.stdin.readline())["error"]["code"] == -32601
    elif message["method"] == "tools/call":
        result = {"content": [], "structuredContent": message["params"]["arguments"]}
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
OBJECT = {"type": "object", "properties": {"x": {"type": "string", "title": "X"}}, "title": "aArguments"}


def build_fake(*pages, version="2025-06-18"):
    """The command of a server that needs no package."""
    return [sys.executable, "-I", "-S", "-c", FAKE, json.dumps(pages), version]


OTHER = """
import json, sys
answers = [json.loads(each) for each in sys.argv[1:]]
for line in sys.stdin:
    message = json.loads(line)
    if message["method"] == "initialize":
        answer = {"result": {"protocolVersion": "2025-06-18"}}
    else:
        answer = answers.pop(0) if answers and "id" in message else {}
    if answer:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
"""


def build_other(*answers):
    """The command of a server that gives the answers in order, and none for an empty one."""
    return [sys.executable, "-I", "-S", "-c", OTHER, *answers]


@contextlib.contextmanager
def serve_http(port):
    process = subprocess.Popen([*PROGRAM, "http", str(port)])
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/")
                break
            assert process.poll() is None
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url():
    with serve_http(find_free_port()) as url:
        yield url


def load(server, **options):
    return {each.name: each for each in load_mcp_tools(server, **options)}


@pytest.fixture(scope="module")
def shared():
    """Tools over stdio; the server is started again after the tests that end it."""
    return load([*PROGRAM, "stdio"], timeout_s=2)


@pytest.mark.anyio
@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_tools_of_a_real_server_are_called(transport, shared, url):
    tools = shared if transport == "stdio" else load(url, timeout_s=2)
    assert tools["add"].schema["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
    assert (tools["echo"].text_argument, tools["add"].text_argument) == ("text", None)
    results = await asyncio.gather(*(tools["add"].call({"a": n, "b": 1}) for n in range(20)))
    assert [each.text for each in results] == [str(n + 1) for n in range(20)]
    failed = await tools["fail"].call({"reason": "no"})
    assert (failed.ok, failed.failure) == (False, "error") and failed.text.startswith("Error executing tool fail")
    slow = await tools["wait"].call({"seconds": 60})
    assert (slow.failure, slow.text) == ("timeout", "Error: wait took longer than 2 s and was stopped.")
    with pytest.raises(ToolUnavailableError, match="the tool look of .* returned a part of type image; only text is"):
        await tools["look"].call({})
    assert (await tools["echo"].call({"text": "still here"})).text == "still here"


@pytest.mark.anyio
async def test_a_session_has_a_state_of_its_own_for_all_tools():
    tools = load([*PROGRAM, "stdio"], is_session=True)
    environment = Environment(EnvironmentSection(protocol="native"), tools=[*tools.values()])
    toolbox = Toolbox(tools=environment.tools, max_calls=9, max_result_chars=1000)
    reply = environment.protocol.write_call("", tools["count_up"], '{"by": 2}', number=0)
    (call,) = environment.begin("q").append(*reply).open_calls
    echo = environment.begin("q").append(*environment.protocol.write_call("", tools["echo"], "x", number=0)).open_calls
    before = count_open_sessions()
    async with toolbox:
        assert [each.result for each in await toolbox.run([call, call, *echo])] == ["2", "4", "x"]
        assert count_open_sessions() == before + 1
    assert count_open_sessions() == before
    async with Toolbox(tools=environment.tools, max_calls=9, max_result_chars=1000) as other:
        assert [each.result for each in await other.run([call])] == ["2"]


@pytest.mark.anyio
async def test_a_server_that_ended_is_a_failure_and_the_next_call_starts_it_again(shared):
    await shared["count_up"].call({})
    waiting = asyncio.create_task(shared["wait"].call({"seconds": 60}))
    await asyncio.sleep(0)
    with pytest.raises(ServerLostError, match=r"mcp_servers.py stdio' has ended \(status 7\): out of memory"):
        await shared["die"].call({})
    with pytest.raises(ServerLostError):
        await waiting
    assert (await shared["count_up"].call({})).text == "1"


@pytest.mark.anyio
async def test_a_server_that_hangs_is_a_failure(shared, monkeypatch):
    monkeypatch.setattr("tunesmith.tools.mcp.PING_TIMEOUT_S", 0.1)
    monkeypatch.setattr("tunesmith.json_rpc.END_TIMEOUT_S", 0.1)
    with pytest.raises(ServerLostError, match=r"answered neither a call of hang in 2 s nor a ping after it"):
        await shared["hang"].call({})
    assert (await shared["echo"].call({"text": "a"})).text == "a"


@pytest.mark.anyio
async def test_a_rollout_that_lost_its_server_is_made_again_without_its_first_turns(shared):
    environment = Environment(tools=[*shared.values()])
    replies = ["<think>a</think><die>{}</die>", "<think>b</think><answer>\\boxed{4}</answer>"]
    script = iter(replies)
    service = build_service(
        lambda *_: [*TOKENIZER.encode(next(script), add_special_tokens=False), TOKENIZER.eos_token_id]
    )

    async def agent(task, model) -> WorkflowOutput:
        return await tool_agent(task, model, environment)

    async def judge(task, response) -> JudgeOutput:
        return JudgeOutput(reward=1.0)

    async def run() -> Trajectory:
        twice = Agent(workflow=agent, judge=judge, timeout_s=60, max_attempts=2)
        return await run_trajectory(TASK, 0, agent=twice, model=service, auxiliary_models={}, seed=1)

    trajectory = await run()
    assert (trajectory.failure, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 1)
    script = iter(replies[:1] * 2)
    lost_twice = await run()
    assert lost_twice.reward is None and "ServerLostError" in lost_twice.failure.message


@pytest.mark.anyio
async def test_a_lost_http_server_is_a_failure():
    with serve_http(find_free_port()) as url:
        tools = load(url)
        with pytest.raises(ServerLostError):
            await tools["die"].call({})
    with pytest.raises(ServerLostError, match=f"the MCP server '{url}' does not answer: "):
        await tools["echo"].call({"text": "a"})


class FailingProxy(http.server.BaseHTTPRequestHandler):
    """An MCP server over HTTP, a call of which gets a 502; with `is_lost` so does what follows in its session."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server, message = self.server, json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = self.headers.get("mcp-session-id") or f"s{len(server.sessions)}"
        name = message.get("params", {}).get("name")
        result = {"content": [{"type": "text", "text": session}]}
        if message["method"] == "initialize":
            server.sessions.append(session)
            result = {"protocolVersion": "2025-06-18"}
        elif message["method"] == "tools/list":
            result = {"tools": [{"name": each, "inputSchema": OBJECT} for each in ("fail", "ok", "slow")]}
        elif name == "slow":
            server.is_slow.set()
            assert server.has_failed.wait(20)
        is_lost = name == "fail" or (server.is_lost and server.has_begun and session == "s0" and name != "slow")
        server.has_begun |= name == "fail"
        body = (
            b"Bad gateway"
            if is_lost
            else json.dumps({"jsonrpc": "2.0", "id": message.get("id"), "result": result}).encode()
        )
        self.send_response(502 if is_lost else 200)
        for header, value in (("content-type", "application/json"), ("mcp-session-id", session)):
            self.send_header(header, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self):
        self.server.sessions.append("end")
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.anyio
@pytest.mark.parametrize("is_lost", [False, True])
async def test_one_server_error_fails_one_call_of_a_shared_connection(is_lost):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), FailingProxy) as server:
        server.sessions, server.is_lost, server.has_begun = [], is_lost, False
        server.is_slow, server.has_failed = threading.Event(), threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tools = load(f"http://127.0.0.1:{server.server_port}")
        slow = asyncio.create_task(tools["slow"].call({}))
        assert await asyncio.to_thread(server.is_slow.wait, 20)
        with pytest.raises(ServerLostError, match="status 502: Bad gateway"):
            await tools["fail"].call({})
        next_session = (await tools["ok"].call({})).text
        server.has_failed.set()
        assert (await slow).text == "s0"
        assert (next_session, server.sessions) == (("s1", ["s0", "s1", "end"]) if is_lost else ("s0", ["s0"]))
        server.shutdown()


def test_the_process_ends_with_its_tools(tmp_path):
    body = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n" + FAKE
    command = build_fake([{"name": "a", "inputSchema": OBJECT}])
    tools = load([*command[:4], body, *command[5:]])
    number = int((tmp_path / "pid").read_text())
    os.kill(number, 0)
    del tools
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.anyio
async def test_a_run_file_names_a_server_with_limits_and_a_prefix():
    tools = [
        {"name": "a.b", "inputSchema": OBJECT | {"additionalProperties": True}},
        {"name": "c", "inputSchema": OBJECT},
    ]
    command = build_fake(*([each] for each in tools))
    entry = {"mcp": command, "name": "files", "max_calls": 2, "max_result_chars": 300, "settings": {"tools": ["a.b"]}}
    environment = load_environment(build_section(EnvironmentSection, {"tools": [entry, "calculator"]}))
    assert list(environment.tools) == ["files__a_b", "calculator"]
    tool = environment.tools["files__a_b"]
    assert (tool.max_calls, tool.max_result_chars) == (2, 300)
    assert (await tool.call({"x": "1", "other": 2})).text == '{"x": "1", "other": 2}'
    section = build_section(EnvironmentSection, {"tools": [{"mcp": shlex.join(command)}]})
    assert list(load_environment(section).tools) == ["a_b", "c"]
    assert build_section(EnvironmentSection, section.model_dump(mode="json")) == section
    assert "mcp" not in build_section(EnvironmentSection, {"tools": ["python"]}).model_dump()["tools"][0]


TOOL = {"name": "a", "inputSchema": OBJECT}
WRONG = {"type": "object", "properties": {"x": {"type": "int"}}}


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({}, "a tool has either `tool` or `mcp`"),
        ({"mcp": ""}, "mcp is empty: give the URL of a server, or the command that starts one"),
        ({"mcp": "no-such-program a"}, r"the MCP server 'no-such-program a' cannot be started: No such file"),
        (
            {"mcp": [sys.executable, "-I", "-S", "-c", "raise ValueError('no key')"]},
            r"has ended \(status 1\): ValueError: no key",
        ),
        (
            {"mcp": [sys.executable, "-I", "-S", "-c", "print('Hello'); input(); input()"],
             "settings": {"start_timeout_s": 0.3}},
            r"has not answered after start_timeout_s=0\.3",
        ),
        ({"mcp": build_fake([TOOL], version="1999-01-01")}, "speaks version '1999-01-01' of the protocol; supported"),
        ({"mcp": build_fake([])}, "has no tools"),
        ({"mcp": build_fake([TOOL]), "settings": {"tools": ["b"]}}, "has no tool 'b'; its tools are a"),
        ({"mcp": build_fake([TOOL]), "settings": {"tool": ["b"]}}, "tool is not a known key: did you mean 'tools'"),
        (
            {"mcp": build_fake([{"name": "a", "inputSchema": WRONG}])},
            "tool 'a': the parameters of tool 'a' are no valid JSON schema: properties/x/type",
        ),
        ({"mcp": build_fake([{"name": "a"}])}, "the parameters of tool 'a' must be a JSON schema with type: object"),
        ({"mcp": build_fake([{"name": "a", "inputSchema": "x"}])}, "tool 'a': 'str' object has no attribute"),
        ({"mcp": build_other("{}"), "settings": {"start_timeout_s": 1}}, "not list its tools: no answer in start_"),
        ({"mcp": build_other('{"error": {"code": 1, "message": "no"}}')}, "the MCP server .* not list its tools: no"),
        ({"mcp": build_fake([{"name": "think", "inputSchema": OBJECT}])}, "'think' is not a tool name"),
        ({"mcp": build_fake([TOOL]), "settings": {"headers": {"a": "b"}}}, "is a command: headers have no effect"),
        (
            {"mcp": "http://127.0.0.1:9/mcp", "settings": {"headers": {"Authorization": "Bearer $NO_SUCH_KEY"}}},
            "settings.headers.Authorization: the environment variable NO_SUCH_KEY is not set",
        ),
        ({"mcp": "http://127.0.0.1:9/mcp"}, "the MCP server 'http://127.0.0.1:9/mcp' does not answer: "),
        ({"tool": "calculator", "is_session": True}, "is_session=true has no effect with tool=calculator"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_before_a_model_loads(entry, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_environment(build_section(EnvironmentSection, {"tools": [entry]}))
    assert "\n" not in str(caught.value)


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["hi", None, {"type": "text"}])
async def test_a_part_that_is_no_text_is_a_failure_that_names_the_server(part):
    listed = {"result": {"tools": [{"name": "a", "inputSchema": {"type": "object"}}]}}
    (tool,) = load_mcp_tools(build_other(json.dumps(listed), json.dumps({"result": {"content": [part]}})))
    with pytest.raises(ToolUnavailableError, match="the tool a of the MCP server .* returned a part of type"):
        await tool.call({})


def test_a_url_that_is_no_mcp_server_is_named(url):
    address = url.replace("/mcp", "/other")
    with pytest.raises(ConfigError, match=f"the MCP server '{address}' answered with status 404: Not Found"):
        load(address)
