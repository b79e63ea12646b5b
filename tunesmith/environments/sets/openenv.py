"""OpenEnv: an environment that a server has, by its URL, as in `openenv:http://127.0.0.1:8000`.

An episode is a WebSocket of its own, closed with it; what the server calls invalid in an action is an observation.
An action of one required text is the model's reply. Others are the arguments of the tool `act`, and those of servers
with MCP tools are calls of these tools, until a reply that calls none.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any

import aiohttp
import httpx
from pydantic import Field

from tunesmith.environments.episode import Places, Reply, TaskEnvironment
from tunesmith.errors import ConfigError, ServerLostError, ToolUnavailableError
from tunesmith.tools.tool import ToolInputError, drop_titles, find_text_argument, write_schema

START_TIMEOUT_S = 20.0
MAX_CHARS = 300


def load(
    member: str, *, num_sessions: Annotated[int, Field(ge=1)] = 1, reset: Mapping[str, Any] | None = None
) -> TaskEnvironment:
    """`num_sessions`: the episodes that the server allows at a time; `reset`: arguments of each reset."""
    url = member.rstrip("/")
    create = functools.partial(Episode, url, read_action_schema(url), dict(reset or {}))
    return TaskEnvironment(name=f"openenv:{member}", create=create, places=load_places(url, num_sessions))


@functools.cache
def load_places(url: str, number: int) -> Places:
    return Places(number)


def read_action_schema(url: str) -> dict[str, Any]:
    """The JSON schema of actions; ConfigError if no such server answers at the URL."""
    try:
        response = httpx.get(f"{url}/schema", timeout=START_TIMEOUT_S)
        schema = drop_titles(response.json()["action"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"environment=openenv:{url}: the server does not answer: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = " ".join(response.text.split())[:MAX_CHARS]
        raise ConfigError(
            f"environment=openenv:{url}: no OpenEnv server: /schema answered {response.status_code}: {shown}"
        ) from error
    schema["properties"] = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
    return schema


class Episode:
    """One episode."""

    def __init__(self, url: str, schema: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._url, self._options = url, options
        self._has_tools = "tool_name" in schema["properties"]
        self._text_argument = None if self._has_tools else find_text_argument(schema)
        act = write_schema("act", schema.get("description", "Act in the environment."), schema)
        self.tools: list[dict[str, Any]] = [] if self._text_argument else [act]
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, task: Mapping[str, Any]) -> str:
        self._session = aiohttp.ClientSession()
        try:
            self._socket = await self._session.ws_connect(f"ws{self._url.removeprefix('http')}/ws", max_msg_size=0)
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"openenv:{self._url} does not answer: {error}") from error
        found = await self._ask("reset", {**self._options, "seed": task["seed"]})
        if self._has_tools:
            listed = (await self._ask("step", {"type": "list_tools"}))["observation"]["tools"]
            self.tools = [
                write_schema(each["name"], each.get("description") or "", drop_titles(each["input_schema"]))
                for each in listed
            ]
        return read_observation(found)

    async def step(self, action: Reply) -> tuple[str, float, bool]:
        if self._text_argument is not None:
            data: Mapping[str, Any] = {self._text_argument: str(action)}
        elif not action.calls and self._has_tools:
            return "", 0.0, True
        else:
            names = [each["function"]["name"] for each in self.tools]
            if len(action.calls) != 1 or (call := action.calls[0]).tool not in names or call.arguments is None:
                raise ToolInputError(f"call one tool in a reply, with a JSON object of arguments: {', '.join(names)}")
            as_call = {"type": "call_tool", "tool_name": call.tool, "arguments": call.arguments}
            data = as_call if self._has_tools else call.arguments
        found = await self._ask("step", data)
        return read_observation(found), float(found.get("reward") or 0.0), bool(found["done"])

    async def close(self) -> None:
        if self._session is None:
            return
        async with self._session:
            if self._socket is not None:
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    await self._socket.send_json({"type": "close"})
                    async for _ in self._socket:  # its place at the server is free when the server has closed
                        pass

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._socket is not None
        try:
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive_json()
        except (aiohttp.ClientError, ConnectionError, TypeError) as error:  # TypeError: the end instead of a text
            raise ServerLostError(f"openenv:{self._url} has closed the connection of an episode") from error
        found: Mapping[str, Any] = answer["data"]
        if answer["type"] != "error":
            return found
        code = found.get("code")
        if code == "VALIDATION_ERROR" and kind == "step":
            wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found.get("errors", ())]
            raise ToolInputError("; ".join(wrong) or str(found.get("message")))
        advice = ": set environment.args.num_sessions to what it allows" if code == "CAPACITY_REACHED" else ""
        raise ToolUnavailableError(f"openenv:{self._url} failed in {kind} ({code}): {found.get('message')}{advice}")


def read_observation(found: Mapping[str, Any]) -> str:
    """The one text of an observation, or all that it says as JSON."""
    said = {name: each for name, each in found["observation"].items() if name != "metadata" and each is not None}
    values = list(said.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(said, ensure_ascii=False)
