"""Drives headless Chromium over its DevTools pipe: no driver, no port, no Python package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 120.0


def find_chromium() -> str | None:
    """The browser's program; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One page in a new browser, with what went wrong in it."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 860, is_dark: bool = False) -> None:
        program = find_chromium()
        assert program is not None, "callers check find_chromium"
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += [
            "--disable-extensions",
            "--disable-background-networking",
            "--remote-debugging-pipe",
            "--hide-scrollbars",
        ]
        flags += [f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        wiring = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", wiring, "chromium", program, *flags],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self.errors: list[str] = []
        """Uncaught exceptions, errors in the console and violations of the security policy."""
        target = self._call("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._write)  # the browser exits when its pipe is closed
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A DevTools command for the page."""
        return self._call(method, params, session=self._session)

    def open(self, url: str) -> None:
        """Load a page, also when only the hash differs."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Return as soon as an expression is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not self.evaluate(f"Boolean({expression})"):  # an element as a value is an empty object
            assert time.monotonic() < deadline, f"{expression} stays false; the page shows {self.text()[:2000]}"
            time.sleep(0.02)

    def text(self) -> str:
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_for_text(self, text: str) -> None:
        self.wait(f"document.body && document.body.innerText.includes({json.dumps(text)})")

    def press(self, key: str) -> None:
        """Press a key that types `key`, or Enter or Escape."""
        codes = {"Enter": 13, "Escape": 27}
        text = {} if key == "Escape" else {"text": "\r" if key == "Enter" else key}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=codes.get(key, 0), **text)

    def _call(self, method: str, params: dict[str, Any], *, session: str | None) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], TIMEOUT_S)
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 2**20)
            assert chunk, "the browser ended"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"].get("exception", params)))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(str(params["args"]))
