"""``kvtier llama`` before a real llama-server, as its users run it: two processes and HTTP."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.servers import start_bound

PROGRAM = str(Path(__file__).parent / "llama_server.py")

MISSING = (
    "xllamacpp cannot be imported: pip install xllamacpp brings the llama-server of these tests; "
    "apt-get install libgomp1"
)

START_S = 240.0
"""A guard against hangs, for a machine with ten times the load."""


def require_llama_server() -> None:
    """Skip the module, and say what to install, where there is no llama-server."""
    # In a process of its own, as the server is: here torch may have loaded a library that it lacks there.
    if subprocess.run(
        [sys.executable, "-c", "import xllamacpp"], capture_output=True, check=False
    ).returncode:
        pytest.skip(MISSING, allow_module_level=True)


def start_server(folder: Path, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start a llama-server, whose output goes into a file."""
    log = (folder / "server.log").open("ab")

    def open_server(command: object) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(command, stdout=log, stderr=log)  # type: ignore[call-overload,no-any-return]

    with log:
        return start_bound([sys.executable, PROGRAM, *arguments], open_server)


def find_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Client:
    """Talks to a server or to the front before one."""

    def __init__(self, port: int) -> None:
        self.port = port

    def call(self, path: str, body: object = None, status: int = 200) -> Any:  # noqa: ANN401 - JSON
        answer, found = self.raw(path, body)
        assert found == status, answer[:500]
        return json.loads(answer)

    def raw(self, path: str, body: object = None) -> tuple[bytes, int]:
        data = None if body is None else json.dumps(body)
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=START_S)) as connection:
            connection.request("GET" if body is None else "POST", path, data)
            response = connection.getresponse()
            return response.read(), response.status

    def complete(self, tokens: Sequence[int], num_tokens: int = 4, **fields: object) -> "Completion":
        body = {"prompt": list(tokens), "n_predict": num_tokens, "temperature": 0, "n_probs": 5}
        more = {"return_tokens": True, "ignore_eos": True, "cache_prompt": True}
        return Completion(self.call("/completion", {**body, **more, **fields}))


class Completion:
    """An answer of /completion."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.tokens: list[int] = answer["tokens"]
        self.num_reused: int = answer["timings"]["cache_n"]
        self.num_computed: int = answer["timings"]["prompt_n"]
        self._steps = answer["completion_probabilities"]

    def difference(self, other: "Completion") -> float:
        """Return the largest difference of a log-probability."""
        worst = 0.0
        for own, others in zip(self._steps, other._steps, strict=True):
            found = {top["id"]: top["logprob"] for top in others["top_logprobs"]}
            for top in own["top_logprobs"]:
                worst = max(worst, abs(top["logprob"] - found.get(top["id"], top["logprob"])))
        return worst


class RunningFront(Client):
    """A front with the server that it has started, or none with ``url``; ends both."""

    def __init__(
        self,
        folder: Path,
        server_arguments: Sequence[str],
        own_arguments: Sequence[str] = (),
        settings: Mapping[str, object] | None = None,
        program: Sequence[str] = (sys.executable, PROGRAM),
    ) -> None:
        super().__init__(find_port())
        self.log_path = folder / "front.log"
        config = folder / "kvtier.json"
        tier = {"type": "fs", "root_dir": str(folder / "store"), "capacity_bytes": "256MiB"}
        default = {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier], "llama": {"idle_s": 0.2}}
        config.write_text(json.dumps({**default, **(settings or {})}))
        command = [sys.executable, "-m", "kvtier", "llama", "--config", str(config)]
        command += ["--listen", f"127.0.0.1:{self.port}", *own_arguments]
        command += ["--", *program, *server_arguments] if server_arguments else []
        self._log = self.log_path.open("wb")
        self.process = start_bound(command, self._open)
        self.wait_started()

    def _open(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, env=dict(os.environ))

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_started(self, times: int = 1) -> None:
        """Wait until the front has looked at its server."""
        self.wait_for(lambda: self.log.count("kvtier keeps ") >= times)

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Wait for something that will happen."""
        end_s = time.monotonic() + START_S
        while not is_true():
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < end_s, self.log[-3000:]
            time.sleep(0.02)

    @property
    def is_keeping(self) -> bool:
        return "kvtier keeps the conversations" in self.log

    def close(self) -> str:
        """End both in order, and return the log."""
        self.process.terminate()
        self.process.wait(START_S)
        self._log.close()
        return self.log
