"""Tools of MCP servers (Model Context Protocol), over stdio and streamable HTTP.

    tools = load_mcp_tools("python server.py")              # stdio: the command that starts the server
    tools = load_mcp_tools("https://example.org/mcp")       # streamable HTTP

The server is started and asked for its tools when these are loaded. One connection then serves all rollouts, or with
`is_session` each rollout has its own, opened by its first call and closed with it; for stdio that is a process of its
own. What the tool calls an error (`isError`) is an observation, and so is a call over the time limit by a server that
still answers a ping. A server that has ended, or does not answer, is a failure without a reward: `ServerLostError`,
after which the rollout is made again with a new connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

from pydantic import Field

from tunesmith.config.section import Section
from tunesmith.errors import ConfigError, ServerLostError, ToolUnavailableError
from tunesmith.json_rpc import INVALID_PARAMS, HttpServer, RpcError, Server, ServerProcess, SharedServer
from tunesmith.tools.tool import Tool, ToolResult, drop_titles, find_text_argument
from tunesmith.version import __version__

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol, newest first; the server chooses."""
PING_TIMEOUT_S = 5.0
MAX_PAGES = 1000


class McpToolSection(Section):
    """Settings of an MCP server."""

    tools: tuple[str, ...] = ()
    """Names of those of the server's tools that the agent has; by default all."""
    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers of each request; `$NAME` in a value is an environment variable, so that no key is in the file."""
    start_timeout_s: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds in which the server must answer when it is started."""


def load_mcp_tools(
    server: str | Sequence[str],
    settings: McpToolSection | None = None,
    *,
    prefix: str | None = None,
    timeout_s: float = 60.0,
    is_session: bool = False,
) -> list[Tool]:
    """The tools of an MCP server.

    `server`: the URL of a server, or the command that starts one. `prefix`: the model calls the tools
    `<prefix>__<tool>`. `timeout_s`: seconds of a call. `is_session`: each rollout has a connection of its own, for
    servers that keep state.

    Raises:
        ConfigError: the server cannot be started, does not speak the protocol, or has a tool that cannot be used.
    """
    found = McpServer(server, settings or McpToolSection(), timeout_s=timeout_s)
    try:
        return found.load_tools(prefix=prefix, is_session=is_session)
    except ToolUnavailableError as error:
        raise ConfigError(str(error)) from error
    except (RpcError, TimeoutError) as error:
        reason = str(error) or "no answer in start_timeout_s"
        raise ConfigError(f"{found.label} does not list its tools: {reason}") from error


class McpServer:
    """A server that is started when it is needed: by the first call, and by the next one after it has ended."""

    def __init__(self, target: str | Sequence[str], settings: McpToolSection, *, timeout_s: float) -> None:
        text = target if isinstance(target, str) else shlex.join(target)
        self.target = text if re.match(r"https?://", text) else shlex.split(text)
        """A URL, or a command."""
        self.label = f"the MCP server {text!r}"
        if not self.target:
            raise ConfigError("mcp is empty: give the URL of a server, or the command that starts one")
        if settings.headers and not isinstance(self.target, str):
            raise ConfigError(f"{self.label} is a command: headers have no effect; leave them out")
        self._settings, self._timeout_s = settings, timeout_s
        self._headers = {name: self._fill_in(name, value) for name, value in settings.headers.items()}
        self._shared = SharedServer(self.connect)

    def load_tools(self, *, prefix: str | None, is_session: bool) -> list[Tool]:
        """Start the server and list its tools; ConfigError for one that cannot be used."""
        connection = self._shared.get()
        try:
            listed = {str(each["name"]): each for each in self._list_tools(connection)}
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{self.label} lists a tool without a name") from error
        finally:
            if is_session:
                self._shared.forget(connection)
        wanted = self._settings.tools or tuple(listed)
        if missing := [name for name in wanted if name not in listed]:
            raise ConfigError(f"{self.label} has no tool {missing[0]!r}; its tools are {', '.join(listed) or 'none'}")
        if not wanted:
            raise ConfigError(f"{self.label} has no tools")
        tools = [self._build_tool(listed[name], prefix=prefix, is_session=is_session) for name in wanted]
        if len({each.name for each in tools}) < len(tools):
            raise ConfigError(f"{self.label} has tools whose names differ in punctuation alone: choose some by `tools`")
        return tools

    @asynccontextmanager
    async def open_session(self) -> AsyncIterator[Server]:
        """A connection for one rollout."""
        connection = await asyncio.to_thread(self.connect)
        try:
            yield connection
        finally:
            await asyncio.shield(asyncio.to_thread(connection.close))

    def connect(self) -> Server:
        """A new connection, initialized."""
        connection: Server = (
            HttpServer(self.target, headers=self._headers, label=self.label)
            if isinstance(self.target, str)
            else ServerProcess(self.target, label=self.label)
        )
        limit_s = self._settings.start_timeout_s
        client = {"clientInfo": {"name": "tunesmith", "version": __version__}, "capabilities": {}}
        try:
            with ExitStack() as stack:
                stack.callback(connection.close)
                answer = connection.call("initialize", {"protocolVersion": VERSIONS[0], **client}, timeout_s=limit_s)
                version = answer.get("protocolVersion") if isinstance(answer, dict) else None
                if version not in VERSIONS:
                    supported = f"supported are {', '.join(VERSIONS)}"
                    raise ToolUnavailableError(f"{self.label} speaks version {version!r} of the protocol; {supported}")
                connection.notify("notifications/initialized", {})
                stack.pop_all()
                return connection
        except TimeoutError as error:
            raise ToolUnavailableError(f"{self.label} has not answered after start_timeout_s={limit_s:g}") from error
        except RpcError as error:
            raise ToolUnavailableError(f"{self.label} does not speak MCP: it refused initialize: {error}") from error

    async def run(self, tool: str, connection: Server | None, /, **arguments: Any) -> ToolResult:
        """Call a tool in a thread; without a connection, over the one that all rollouts share."""
        return await asyncio.to_thread(self._call, tool, connection, arguments)

    def _call(self, tool: str, own: Server | None, arguments: Mapping[str, Any]) -> ToolResult:
        connection = own or self._shared.get()
        params = {"name": tool, "arguments": dict(arguments)}
        try:
            return self._read_result(tool, connection.call("tools/call", params, timeout_s=self._timeout_s))
        except TimeoutError as error:
            if not self._keeps(connection):
                raise ServerLostError(
                    f"{self.label} answered neither a call of {tool} in {self._timeout_s:g} s nor a ping after it"
                ) from error
            text = f"Error: {tool} took longer than {self._timeout_s:g} s and was stopped."
            return ToolResult(text=text, failure="timeout")
        except RpcError as error:
            if error.code == INVALID_PARAMS:
                return ToolResult(text=f"Error: {error}", failure="arguments")
            raise ToolUnavailableError(f"the tool {tool} of {self.label} failed: {error} ({error.code})") from error
        except ServerLostError:
            self._keeps(connection)
            raise

    def _keeps(self, connection: Server) -> bool:
        """Whether the server answers a ping: a tool may be slow, and one call may get an error of a proxy. Otherwise
        the server is lost, and the next call opens another connection."""
        try:
            connection.call("ping", {}, timeout_s=PING_TIMEOUT_S)
        except RpcError:
            pass  # an answer
        except (TimeoutError, ToolUnavailableError):
            self._shared.forget(connection)
            return False
        return True

    def _list_tools(self, connection: Server) -> list[Mapping[str, Any]]:
        listed: list[Mapping[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            page = connection.call("tools/list", cursor, timeout_s=self._settings.start_timeout_s)
            listed += page["tools"]
            if page.get("nextCursor") is None:
                return listed
            cursor = {"cursor": page["nextCursor"]}
        raise ConfigError(f"{self.label} lists more than {MAX_PAGES} pages of tools")

    def _build_tool(self, listed: Mapping[str, Any], *, prefix: str | None, is_session: bool) -> Tool:
        name = str(listed["name"])
        shown = re.sub(r"[^\w-]", "_", name if prefix is None else f"{prefix}__{name}", flags=re.ASCII)
        try:
            parameters = drop_titles(listed.get("inputSchema") or {})
            return Tool(
                name=shown,
                description=" ".join(str(listed.get("description") or listed.get("title") or name).split()),
                parameters=parameters,
                run=partial(self.run, name, None),
                text_argument=find_text_argument(parameters),
                timeout_s=None,  # a server that hangs is no observation
                open_session=self.open_session if is_session else None,
                in_session=lambda connection: partial(self.run, name, connection),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{self.label}: tool {name!r}: {error}") from error

    def _read_result(self, tool: str, result: Any) -> ToolResult:
        """The text of a result. Parts of other kinds are refused: the model could not read them."""
        content = result.get("content") if isinstance(result, dict) else None
        if not isinstance(content, list):
            raise ToolUnavailableError(f"{self.label} answered a call of {tool} with no content: {str(result)[:200]}")
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or "text" not in part:
                raise ToolUnavailableError(
                    f"the tool {tool} of {self.label} returned a part of type {kind}; only text is supported: leave "
                    "the tool out (settings.tools)"
                )
        text = "\n".join(str(part["text"]) for part in content)
        if not content and result.get("structuredContent") is not None:
            text = json.dumps(result["structuredContent"], ensure_ascii=False)
        return ToolResult(text=text, failure="error" if result.get("isError") else "")

    def _fill_in(self, name: str, value: str) -> str:
        filled = os.path.expandvars(value)
        if left := re.search(r"\$\{?(\w+)", filled):
            raise ConfigError(f"settings.headers.{name}: the environment variable {left[1]} is not set")
        return filled
