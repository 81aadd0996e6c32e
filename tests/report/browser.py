"""`Browser`: a page in a real headless Chromium, driven over its DevTools protocol.

    test ──method, params──> pipe ──> browser        commands are answered in order of their numbers
         <──answers, events── pipe <──                events in between are kept: console, errors, requests

The protocol's messages are JSON objects that end with a zero byte, on file descriptors 3 (in) and 4 (out):
https://chromedevtools.github.io/devtools-protocol, ``--remote-debugging-pipe``. No port, no driver program, no package.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.report.confinement import Way, room_for, start, ways
from tools.make_browser import find_browser

__all__ = ["DESK", "PHONE", "Browser", "any_browser", "show"]

#: Widths in pixels.
DESK, PHONE = 1280, 390

_FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Browser:
    """One browser with one page.

    Args:
        program: the executable.

    Attributes:
        way: how it runs. reasons: why not in the more confined ways, each with what the browser said.
        pid: of its first process. address: of the page shown.
        problems: console messages, page errors and policy violations.
        requests: addresses requested by the page, its own file included.
    """

    def __init__(self, program: Path, timeout_s: float = 60.0) -> None:
        self.reasons: list[str] = []
        self.address = ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._program = program
        self._timeout_s = timeout_s
        self._number = 0
        self._session = ""
        self._buffer = b""
        self._loaded = False

    def __enter__(self) -> Browser:
        with ExitStack() as stack:
            self._room = stack.enter_context(room_for(self._program))
            choices = ways(os.getuid())
            for self.way in choices:
                try:
                    self._start(self.way)
                    break
                except (EOFError, OSError) as error:  # OSError: its pipe is closed, or it is silent
                    if self.way == choices[-1]:
                        raise
                    self.reasons.append(f"{self.way}: {error}")
            self._stack = stack.pop_all()
        return self

    def _start(self, way: Way) -> None:
        """Start it in one way, and open its page."""
        self._buffer, self._session = b"", ""
        command_out, self._commands = os.pipe()
        self._answers, answer_in = os.pipe()
        log = self._room.pages.parent / "log"
        self._process = start(way, self._room, _FLAGS, (command_out, answer_in), log)
        self.pid = self._process.pid
        os.close(command_out)
        os.close(answer_in)
        try:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.send(f"{domain}.enable")
            self.evaluate("1 + 1")  # by the process of the page
        except BaseException as error:
            self._close()
            told = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            error.args = (f"{error}; it says: {told[-1] if told else 'nothing'}",)
            raise

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._close()
        self._stack.close()

    def _close(self) -> None:
        os.close(self._commands)
        os.close(self._answers)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Show a copy of `file` in a fresh window of this size and scheme, and wait until it is loaded."""
        self.problems.clear()
        self.requests.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        page = self._room.pages / file.name
        shutil.copyfile(file, page)
        page.chmod(0o644)
        self.address = page.as_uri()
        self.send("Page.navigate", url=self.address)
        while not self._loaded:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression; promises are awaited."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real pointer click in the middle of the first matching element."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{place}.scrollIntoView({{block: 'center'}})")
        x, y = self.evaluate(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({place}.getBoundingClientRect())")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = "none" if kind == "mouseMoved" else "left"
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def picture(self) -> bytes:
        """The whole page as PNG."""
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message, recorded if it is an event."""
        deadline_s = time.monotonic() + self._timeout_s
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(deadline_s - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(f"{self._program}: silent for {self._timeout_s:.0f} s")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise EOFError(f"{self._program}: ended")
            self._buffer += part
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.problems.append(json.dumps(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.problems.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True


@contextmanager
def any_browser() -> Iterator[Browser]:
    """The browser that there is; without one, the test is skipped."""
    program = find_browser()
    if program is None:
        pytest.skip("no chromium or chrome on PATH, and `make browser` could fetch none")
    with Browser(program) as browser:
        yield browser


def show(browser: Browser, file: Path, *, width: int = DESK, dark: bool = False) -> None:
    """Show a report, and check that its script has drawn it."""
    browser.open(file, width=width, dark=dark)
    assert browser.evaluate("document.documentElement.dataset.drawn") == "yes", browser.problems
