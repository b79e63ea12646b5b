"""OpenEnv servers: episodes over a WebSocket each, rewards, mistakes, lost servers.

Continuous integration has a stand-in for a server. With `TUNESMITH_TEST_OPENENV=/path/to/python`, the same tests run
environments of the real package there.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import httpx
import pytest

from free_ports import find_free_port
from tunesmith.environments.episode import Reply
from tunesmith.environments.sets import load_set
from tunesmith.environments.transcript import Segment
from tunesmith.errors import ConfigError, ServerLostError, ToolUnavailableError
from tunesmith.rollout.open_sessions import count_open_sessions

REAL = os.environ.get("TUNESMITH_TEST_OPENENV")
REAL_SERVER = """
import os, random, sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    guess: int

class Echo(Action):
    message: str

class Said(Observation):
    text: str = ""

class World(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(episode_id="x", step_count=0)
    @property
    def state(self):
        return self._state

class Game(World):
    def reset(self, seed=None, episode_id=None, highest=9, **more):
        self.number = random.Random(seed).randint(1, highest)
        return Said(text=f"Guess from 1 to {highest}.", done=False, reward=None)
    def step(self, action, timeout_s=None, **more):
        if action.guess == 13:
            raise RuntimeError("unlucky")
        if action.guess == 66:
            os._exit(1)
        is_right = action.guess == self.number
        text = "Right." if is_right else "Higher." if action.guess < self.number else "Lower."
        return Said(text=text, done=is_right, reward=1.0 if is_right else -0.25)

class Parrot(World):
    def reset(self, seed=None, episode_id=None, **more):
        return Said(text=f"Speak {seed}.", done=False)
    def step(self, action, timeout_s=None, **more):
        return Said(text=action.message.upper(), done=action.message == "bye", reward=float(len(action.message)))

kind, port = sys.argv[1], int(sys.argv[2])
if kind == "tools":
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    mcp = FastMCP("tools")
    @mcp.tool
    def add(a: int, b: int) -> int:
        "The sum."
        return a + b
    class Tools(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True
        def __init__(self):
            super().__init__(mcp)
            self._state = State(episode_id="x", step_count=0)
        @property
        def state(self):
            return self._state
        def reset(self, seed=None, episode_id=None, **more):
            return Said(text="Add 1 and 2.", done=False)
        def _step_impl(self, action, timeout_s=None, **more):
            raise RuntimeError("only tools")
    app = create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=2)
else:
    app = create_fastapi_app({"guess": Game, "echo": Parrot}[kind], {"guess": Guess, "echo": Echo}[kind], Said,
                             max_concurrent_envs=2)
uvicorn.run(app, port=port, log_level="error")
"""
STAND_IN = """
import asyncio, json, os, random, sys
from aiohttp import web

kind, port = sys.argv[1], int(sys.argv[2])
TEXT = {"type": "string", "title": "x"}
SCHEMAS = {
    "guess": {"properties": {"guess": {"type": "integer"}}, "required": ["guess"]},
    "echo": {"properties": {"message": TEXT}, "required": ["message"]},
    "tools": {"properties": {"tool_name": TEXT, "arguments": {"type": "object"}}, "required": ["tool_name"]},
}
ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
num_open = 0

def schema(request):
    action = {"type": "object", "description": "Act.", **SCHEMAS[kind]}
    action["properties"] = {"metadata": {"type": "object"}, **action["properties"]}
    return web.json_response({"action": action, "observation": {}, "state": {}})

def say(text, reward=None, done=False, **more):
    return {"observation": {"text": text, "metadata": {}, **more}, "reward": reward, "done": done}

def answer(state, kind_of, data):
    if kind_of == "reset":
        highest = data.get("highest", 9)
        state["number"] = random.Random(data["seed"]).randint(1, highest)
        texts = {"guess": f"Guess from 1 to {highest}.", "echo": f"Speak {data['seed']}.", "tools": "Add 1 and 2."}
        return say(texts[kind])
    if kind == "echo":
        return say(data["message"].upper(), float(len(data["message"])), data["message"] == "bye")
    if kind == "tools":
        if data["type"] == "list_tools":
            listed = [{"name": "add", "description": "The sum.", "input_schema": ADD}]
            return {"observation": {"tools": listed}, "done": False}
        return {"observation": {"tool_name": "add", "result": {"data": sum(data["arguments"].values())}, "error": None},
                "reward": None, "done": False}
    if not isinstance(data.get("guess"), int):
        raise KeyError
    if data["guess"] == 13:
        raise RuntimeError("unlucky")
    if data["guess"] == 66:
        os._exit(1)
    is_right = data["guess"] == state["number"]
    text = "Right." if is_right else "Higher." if data["guess"] < state["number"] else "Lower."
    return say(text, 1.0 if is_right else -0.25, is_right)

async def connect(request):
    global num_open
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async def fail(code, text, **more):
        await socket.send_json({"type": "error", "data": {"code": code, "message": text, **more}})
    if num_open == 2:
        await fail("CAPACITY_REACHED", "Maximum concurrent sessions reached")
        return socket
    num_open += 1
    try:
        state = {}
        async for message in socket:
            message = message.json()
            if message["type"] == "close":
                break
            try:
                await socket.send_json({"type": "observation", "data": answer(state, message["type"], message["data"])})
            except KeyError:
                errors = [{"loc": ["guess"], "msg": "Input should be a valid integer, unable to parse string"}]
                await fail("VALIDATION_ERROR", "Invalid message", errors=errors)
            except RuntimeError as error:
                await fail("EXECUTION_ERROR", str(error))
    finally:
        await asyncio.sleep(0.01)
        num_open -= 1
        await socket.close()
    return socket

app = web.Application()
app.add_routes([web.get("/schema", schema), web.get("/ws", connect)])
web.run_app(app, port=port, print=None)
"""


@pytest.fixture
def start(tmp_path):
    """Starts a server; returns its process and its URL."""
    (tmp_path / "server.py").write_text(REAL_SERVER if REAL else STAND_IN)
    processes = []

    def start_server(kind, port=None):
        port = port or find_free_port()
        processes.append(subprocess.Popen([REAL or sys.executable, str(tmp_path / "server.py"), kind, str(port)]))
        for _ in range(600):
            try:
                httpx.get(f"http://127.0.0.1:{port}/schema")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        return processes[-1], f"http://127.0.0.1:{port}"

    yield start_server
    for each in processes:
        each.kill()
        each.wait()


def call(name, **arguments):
    return Reply("", [Segment(kind="call", text="", tool=name, arguments=arguments, call_id="c1")])


async def play(environment, seed, actions):
    async with environment.open({"seed": seed}) as session:
        seen = [session.observation]
        for action in actions:
            await environment.step(session, action)
            seen.append(session.observation)
        return seen, session.rewards, session.is_done, session.schemas


def test_actions_are_calls_and_rewards_are_those_of_the_server(start):
    process, url = start("guess")
    environment = load_set(f"openenv:{url}", {"num_sessions": 2, "reset": {"highest": 3}})

    def read(observation):
        return observation if isinstance(observation, str) else observation[0]["content"]

    async def run():
        seen, rewards, is_done, schemas = await play(environment, 1, [call("act", guess=each) for each in (0, 1)])
        assert [read(each) for each in seen] == ["Guess from 1 to 3.", "Higher.", "Right."]
        assert (rewards, is_done) == ([-0.25, 1.0], True)
        (function,) = [each["function"] for each in schemas]
        assert function["name"] == "act" and list(function["parameters"]["properties"]) == ["guess"]
        mistakes = ["one", call("guess", guess=1), call("act", guess="one")]
        seen, rewards, is_done, _ = await play(environment, 1, mistakes)
        assert read(seen[1]) == "Error: call one tool in a reply, with a JSON object of arguments: act" == read(seen[2])
        assert read(seen[3]).startswith("Error: guess: Input should be a valid integer") and not is_done
        before = count_open_sessions()
        many = await asyncio.gather(*(play(environment, 1, [call("act", guess=1)]) for _ in range(40)))
        assert all(each == many[0] for each in many) and many[0][1] == [1.0]  # two at a time, none refused
        with pytest.raises(ToolUnavailableError, match=r"failed in step \(EXECUTION_ERROR\): unlucky"):
            await play(environment, 1, [call("act", guess=13)])
        crowded = load_set(f"openenv:{url}", {"num_sessions": 9})
        with pytest.raises(ToolUnavailableError, match=r"\(CAPACITY_REACHED\).*set environment.args.num_sessions"):
            async with crowded.open({"seed": 1}), crowded.open({"seed": 1}), crowded.open({"seed": 1}):
                pass
        assert (await play(environment, 1, [call("act", guess=1)]))[1] == [1.0]
        with pytest.raises(ServerLostError, match="has closed the connection of an episode"):
            await play(environment, 1, [call("act", guess=66)])
        process.wait()
        with pytest.raises(ServerLostError, match="does not answer"):
            await play(environment, 1, [])
        start("guess", int(url.rpartition(":")[2]))
        assert (await play(environment, 1, [call("act", guess=1)]))[1] == [1.0]
        assert count_open_sessions() == before

    asyncio.run(run())


def test_a_text_action_is_the_reply_and_tools_of_the_server_are_tools(start):
    environment = load_set(f"openenv:{start('echo')[1]}", {})
    seen, rewards, is_done, schemas = asyncio.run(play(environment, 5, ["hello", "bye"]))
    assert (seen, rewards, is_done, schemas) == (["Speak 5.", "HELLO", "BYE"], [5.0, 3.0], True, [])
    environment = load_set(f"openenv:{start('tools')[1]}", {})
    seen, rewards, is_done, schemas = asyncio.run(play(environment, 5, [call("add", a=1, b=2), "It is 3."]))
    assert [each["function"]["name"] for each in schemas] == ["add"]
    assert "3" in seen[1][0]["content"] and (rewards, is_done) == ([0.0, 0.0], True)


def test_bad_input_is_one_sentence_before_a_model_loads(start, tmp_path):
    with pytest.raises(ConfigError, match="environment=openenv:http://127.0.0.1:9: the server does not answer: "):
        load_set("openenv:http://127.0.0.1:9", {})
    with pytest.raises(ConfigError, match="the server does not answer: "):
        load_set("openenv:localhost", {})
    with pytest.raises(ConfigError, match="'size' in environment.args of openenv:http.*: known: num_sessions, reset"):
        load_set("openenv:http://127.0.0.1:9", {"size": 3})
    port = find_free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port)], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            try:
                httpx.get(f"http://127.0.0.1:{port}")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        with pytest.raises(ConfigError, match="no OpenEnv server: /schema answered 404: <!DOCTYPE"):
            load_set(f"openenv:http://127.0.0.1:{port}", {})
    finally:
        process.kill()
        process.wait()
