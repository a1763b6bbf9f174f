"""The first token of a next turn after a restart: cold, from llama.cpp's own slot file, and behind ``kvtier llama``.

    python -m benchmarks.llamacpp MODEL --server "llama-server" --tokens 500 2000        a table in Markdown

The model and the server are the user's; prompts are made-up token ids. Each row restarts server and front.
"""

import argparse
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

NEW_TOKENS = 24


class Server:
    """A server, or the front before one."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self.port = port
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not self._is_ready():
            if self.process.poll() is not None:
                sys.exit(f"{shlex.join(command)} has ended")
            time.sleep(0.05)

    def call(self, path: str, body: object = None) -> Any:  # noqa: ANN401 - JSON
        """Return the answer to a request."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=3600)) as connection:
            connection.request(
                "GET" if body is None else "POST", path, None if body is None else json.dumps(body)
            )
            return json.loads(connection.getresponse().read())

    def first_token_s(self, tokens: Sequence[int], **fields: object) -> tuple[float, int]:
        """Return the seconds until the first token, and how many tokens of the prompt were reused."""
        began_s = time.perf_counter()
        answer = self.call(
            "/completion",
            {"prompt": tokens, "n_predict": 1, "ignore_eos": True, "cache_prompt": True, **fields},
        )
        return time.perf_counter() - began_s, int(answer["timings"]["cache_n"])

    def end(self) -> None:
        """End it in order."""
        self.process.terminate()
        self.process.wait()

    def _is_ready(self) -> bool:
        try:
            return bool(self.call("/health").get("status") == "ok")
        except (OSError, ValueError):
            return False


def find_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def measure(server: Sequence[str], model: str, num_tokens: int, folder: Path) -> list[str]:
    """Return the cells of one row."""
    prompt = [3 + (i * i * 7 + i * 11) % 100 for i in range(num_tokens)]
    turn = [*prompt, *(3 + (i * 17) % 100 for i in range(NEW_TOKENS))]
    slots = folder / "slots"
    slots.mkdir(exist_ok=True)
    own_port, front_port = find_port(), find_port()
    own = [*server, "-m", model, "--port", str(own_port), "--slot-save-path", f"{slots}/", "--cache-ram", "0"]
    alone = Server(own, own_port)
    alone.first_token_s(prompt, id_slot=0)
    alone.call("/slots/0?action=save", {"filename": "own.slot"})
    size_bytes = (slots / "own.slot").stat().st_size
    alone.end()
    alone = Server(own, own_port)
    cold_s, _ = alone.first_token_s(turn, id_slot=0)
    alone.call("/slots/0?action=erase", {})
    began_s = time.perf_counter()
    alone.call("/slots/0?action=restore", {"filename": "own.slot"})
    own_s = time.perf_counter() - began_s + alone.first_token_s(turn, id_slot=0)[0]
    alone.end()
    command = [sys.executable, "-m", "kvtier", "llama", "--listen", f"127.0.0.1:{front_port}", "--dir"]
    command += [str(folder / "store"), "--", *server, "-m", model]
    front = Server(command, front_port)
    front.first_token_s(prompt)
    front.end()
    front = Server(command, front_port)
    front.first_token_s(turn[-3:])  # the self-test has ended
    front_s, reused = front.first_token_s(turn)
    front.end()
    return [
        f"{num_tokens:,}", f"{cold_s:.2f}", f"{own_s:.2f}", f"{front_s:.2f}", f"{reused:,}", f"{size_bytes / 1e6:.1f}"
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--server", default="llama-server", help="program with arguments")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000, 8000])
    given = parser.parse_args()
    print("| tokens | cold (s) | own slot file (s) | `kvtier llama` (s) | reused | slot file (MB) |")
    print("|---:|---:|---:|---:|---:|---:|")
    for num_tokens in given.tokens:
        with tempfile.TemporaryDirectory() as folder:
            cells = measure(shlex.split(given.server), given.model, num_tokens, Path(folder))
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
