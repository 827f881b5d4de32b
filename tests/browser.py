"""A page in a headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --hide-scrollbars --remote-debugging-port=0"
    " --remote-allow-origins=*"
)


class Browser:
    """One tab. `errors`: console errors and exceptions; `requests`: every address asked for."""

    def __init__(self) -> None:
        assert CHROMIUM
        self.home = tempfile.mkdtemp()
        command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={self.home}", "about:blank"]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.loop = asyncio.new_event_loop()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.number = 0
        self.socket = self.loop.run_until_complete(self._connect())
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    async def _connect(self) -> Any:
        from tornado.httpclient import AsyncHTTPClient
        from tornado.websocket import websocket_connect

        port_file = Path(self.home) / "DevToolsActivePort"
        deadline = time.monotonic() + 30
        while not port_file.exists() or not port_file.read_text().strip():
            assert time.monotonic() < deadline, "Chromium did not start"
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json")
        [tab] = [t for t in json.loads(answer.body) if t["type"] == "page"]
        return await websocket_connect(tab["webSocketDebuggerUrl"], max_message_size=1 << 26)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.loop.run_until_complete(self._call(method, parameters))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        await self.socket.write_message(json.dumps(message))
        while True:
            answer = json.loads(await self.socket.read_message())
            if answer.get("id") == self.number:
                return answer["result"]
            self._note(answer["method"], answer["params"])

    def _note(self, event: str, found: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(found["exceptionDetails"]))
        if event == "Runtime.consoleAPICalled" and found["type"] == "error":
            self.errors.append(json.dumps(found["args"]))
        if event == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(found["entry"]["text"])

    def open(self, page: Path, *, width: int, height: int, dark: bool = False) -> None:
        self.errors, self.requests = [], []
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not self.js(condition):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.05)

    def point_at(self, selector: str) -> None:
        """The mouse moves onto the middle of the first element that matches."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{element}.scrollIntoView({{block: 'center'}})")
        time.sleep(0.2)  # the page's own scroll events come first
        box = self.js(
            f"(b => [b.x + b.width / 2, b.y + b.height / 2])({element}.getBoundingClientRect())"
        )
        for offset in (3, 0):
            x, y = box[0] + offset, box[1]
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def close(self) -> None:
        self.socket.close()
        self.loop.close()
        self.process.terminate()
        self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)
