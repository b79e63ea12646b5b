"""A local stand-in for the hub: the endpoints that an upload uses, answered as the hub answers them.

Small text files come in the commit, others through Git LFS, whose content is checked against its digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_writer"


@dataclass
class HubState:
    """What the server was given."""

    url: str = ""
    is_private: dict[str, bool] = field(default_factory=dict)
    """Repository -> its visibility."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    read_only: bool = False


@contextmanager
def serve_hub() -> Iterator[HubState]:
    state = HubState()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, content: Any = None, **headers: str) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def read_body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def is_allowed(self) -> bool:
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                return True
            self.answer(401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials")
            return False

        def do_HEAD(self) -> None:
            self.answer(200)

        def do_GET(self) -> None:
            name = self.path.removeprefix("/api/models/")
            if not self.is_allowed():
                return
            if self.path == "/api/whoami-v2":
                self.answer(200, {"type": "user", "name": "me", "orgs": []})
            elif name in state.is_private:
                self.answer(200, {"id": name, "private": state.is_private[name], "siblings": [], "tags": []})
            else:
                self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")

        def do_PUT(self) -> None:
            body = self.read_body()
            oid = self.path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            state.objects[oid] = body
            self.answer(200)

        def do_POST(self) -> None:
            body = self.read_body()
            if not self.is_allowed():
                return
            name = self.path.removeprefix("/api/models/")
            if self.path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif self.path == "/api/repos/create":
                self.create(json.loads(body))
            elif self.path.endswith(".git/info/lfs/objects/batch"):
                given = json.loads(body)["objects"]
                upload = [{**each, "actions": {"upload": {"href": f"{state.url}/lfs/{each['oid']}"}}} for each in given]
                self.answer(200, {"transfer": "basic", "objects": upload})
            elif name.endswith("/preupload/main"):
                paths = [each["path"] for each in json.loads(body)["files"]]
                modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
                files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
                self.answer(200, {"files": files})
            else:
                self.commit(name.removesuffix("/commit/main"), [json.loads(line) for line in body.splitlines()])

        def create(self, given: dict[str, Any]) -> None:
            name = f"{given['organization']}/{given['name']}"
            if state.read_only:
                self.answer(403, {"error": "no right"}, X_Error_Message="no right")
            elif name in state.is_private:
                self.answer(409, {"error": "exists", "url": f"{state.url}/{name}"})
            else:
                state.is_private[name] = given.get("visibility") == "private"
                self.answer(200, {"url": f"{state.url}/{name}", "id": name, "name": name})

        def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
            found = state.files.setdefault(name, {})
            for line in lines:
                if line["key"] == "file":
                    assert line["value"]["encoding"] == "base64"
                    found[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    found[line["value"]["path"]] = state.objects[line["value"]["oid"]]
            self.answer(
                200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{state.url}/{name}/commit/{'0' * 40}"}
            )

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
