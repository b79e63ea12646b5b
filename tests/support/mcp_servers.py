"""MCP servers written with the official package, 1.x or 2.x: `python mcp_servers.py stdio`, or `http PORT`."""

from __future__ import annotations

import os
import sys
import time

try:
    from mcp.server import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server


def build(**options):
    server = Server("numbers", **options)
    state = {"total": 0}

    @server.tool()
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    @server.tool()
    def echo(text: str) -> str:
        """Return the text."""
        return text

    @server.tool(name="count.up")
    def count(by: int = 1) -> str:
        """Add to a total that the server keeps."""
        state["total"] += by
        return str(state["total"])

    @server.tool()
    def fail(reason: str) -> str:
        """Raise."""
        raise ValueError(reason)

    @server.tool()
    def die() -> str:
        """End the server."""
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(7)

    @server.tool()
    async def wait(seconds: float) -> str:
        """Wait, and answer others meanwhile."""
        import asyncio

        await asyncio.sleep(seconds)
        return "done"

    @server.tool()
    async def hang() -> str:
        """Block the whole server."""
        time.sleep(600)  # noqa: ASYNC251 - so it answers nothing
        return "done"

    @server.tool()
    def look():
        """An image."""
        from mcp.types import ImageContent

        try:
            return [ImageContent(type="image", data="AAAA", mimeType="image/png")]
        except ValueError:
            return [ImageContent(type="image", data="AAAA", mime_type="image/png")]

    return server


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        build().run("stdio")
    else:
        import uvicorn

        app = build().streamable_http_app()
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
