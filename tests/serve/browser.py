"""A headless Chromium, driven over the pipe of its DevTools protocol: JSON with a zero byte after each message."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_OPTIONS = ("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
DEADLINE_S = 120.0


class Page:
    """One tab. `faults` are errors that it wrote to its console, uncaught exceptions, and requests that failed."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = os.fdopen(reading, "rb"), os.fdopen(writing, "wb")
        self._number, self._session, self._rest = 0, "", b""
        self.faults: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": arguments, **session}
        self._writing.write(json.dumps(message).encode() + b"\0")
        self._writing.flush()
        while (found := self._next()).get("id") != self._number:
            self._note(found)
        assert "error" not in found, found
        return found["result"]

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            piece = os.read(self._reading.fileno(), 1 << 16)
            assert piece, "Chromium is gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        facts = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.faults.append(str(facts["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.faults.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")
        elif event.get("method") == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
            self.faults.append(str(facts["args"]))

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def eval(self, script: str) -> Any:
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until it is true."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.eval(script):
            assert time.monotonic() < deadline, f"{script} does not come true; the page says: {self.text()}"
            time.sleep(0.05)

    def text(self, selector: str = "body") -> str:
        return str(self.eval(f"document.querySelector({json.dumps(selector)}).innerText"))

    def resize(self, width: int, height: int = 900) -> None:
        is_phone = width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def darken(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._writing.close()
        self._reading.close()


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Its profile lies in `folder`; it is gone at the end."""
    assert CHROMIUM is not None
    from_us, to_them = os.pipe()
    from_them, to_us = os.pipe()
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}', CHROMIUM, *_OPTIONS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        page = Page(from_them, to_them)
        try:
            yield page
        finally:
            page.close()
    finally:
        process.terminate()
        process.wait(timeout=60)
