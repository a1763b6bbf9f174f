"""A real headless browser for tests, driven over the pipe of Chromium's DevTools protocol: no port, no library.

It opens pages that are files and works offline. What the page asked the network for and what it complained about is
kept, for a test to find nothing in it.
"""

import base64
import io
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

JSON: TypeAlias = Any

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""What is looked for, the smallest first."""

HANG_S = 120.0
"""Guards against a browser that has stopped; an answer takes milliseconds."""

READ_BYTES = 1 << 16
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests run as root in a container, where its sandbox cannot start
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)

STARTER = """
import fcntl, os, sys
free = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(free[0], 3)
os.dup2(free[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts the pipes where the protocol has them, as numbers 3 and 4 of the browser."""

COMPLAINTS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
REQUEST = "Network.requestWillBeSent"


def find_browser() -> str | None:
    """Return the path of the first browser that is installed, None when none is."""
    return next((path for name in PROGRAMS if (path := shutil.which(name)) is not None), None)


class Browser:
    """One page of a running browser. Used from one thread.

    Args:
        write_fd: where commands go.
        read_fd: where answers and events come from.
    """

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd = write_fd
        self._read_fd = read_fd
        self._last_id = 0
        self._rest = b""
        self._events: list[dict[str, JSON]] = []
        self._session: str | None = None
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")
        self.command(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        self._events.clear()

    def command(self, method: str, **parameters: JSON) -> JSON:
        """Send a command and return its result.

        Raises:
            AssertionError: the browser refuses it.
        """
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        unsent = json.dumps(message).encode() + b"\0"
        while unsent:
            unsent = unsent[os.write(self._write_fd, unsent) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._events.append(answer)

    def open(self, path: Path) -> None:
        """Load a file and wait until it and its scripts are done."""
        self.command("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._receive())

    def evaluate(self, expression: str) -> JSON:
        """Return the value of an expression on the page."""
        result = self.command("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def set_colour_scheme(self, scheme: str) -> None:
        """Let the page believe that its reader prefers "light" or "dark"."""
        self.command(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def take_picture(self) -> npt.NDArray[np.float64]:
        """Return the whole page as it looks, shape (height, width, 3), from 0 to 1."""
        from matplotlib.image import imread

        picture = self.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        pixels = imread(io.BytesIO(base64.b64decode(picture["data"])))
        return np.asarray(pixels, np.float64)[:, :, :3]

    @property
    def complaints(self) -> list[dict[str, JSON]]:
        """What was written to the console and what was thrown, so far."""
        return [event for event in self._events if event["method"] in COMPLAINTS]

    @property
    def requested(self) -> list[str]:
        """The addresses of everything that was loaded so far."""
        return [event["params"]["request"]["url"] for event in self._events if event["method"] == REQUEST]

    def _receive(self) -> dict[str, JSON]:
        end_s = time.monotonic() + HANG_S
        while b"\0" not in self._rest:
            readable, _, _ = select.select([self._read_fd], [], [], max(0.0, end_s - time.monotonic()))
            assert readable, f"the browser has said nothing for {HANG_S} s"
            read = os.read(self._read_fd, READ_BYTES)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, JSON] = json.loads(message)
        return answer


@contextmanager
def open_browser(program: str, folder: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile in ``folder`` and end it at the end."""
    from_test, to_browser = os.pipe()
    from_browser, to_test = os.pipe()
    starter = [sys.executable, "-c", STARTER, str(from_test), str(to_test)]
    process = subprocess.Popen(
        [*starter, program, *FLAGS, f"--user-data-dir={folder}"],
        pass_fds=(from_test, to_test),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(from_test)
    os.close(to_test)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        os.close(to_browser)  # the browser ends with its pipe
        try:
            process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # What it had started ends a little later by itself, or now.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        os.close(from_browser)
