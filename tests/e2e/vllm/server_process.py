"""vLLM's HTTP server with kvtier, as a process of its own that a test talks to.

The engine core and its worker are processes of the server, as for anybody who runs ``vllm serve``. Most servers are
forked from a process that has imported vLLM, and fork their engine core: two imports are ten times what else a start
takes. What a user types is tried with ``is_new_interpreter``, and by the examples.
"""

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.e2e.vllm.engine_host import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    ENGINE_IMPORTS,
    MAX_MODEL_TOKENS,
    fork_workers,
)
from tests.engines.vllm.entry_points import install_entry_points
from tests.ports import free_port
from tests.tiering.fs.slots import stored_blocks

START_TIMEOUT_S = 240.0
"""Guard against a hang; a start takes about half a minute."""

REQUEST_TIMEOUT_S = 120.0

STOP_TIMEOUT_S = 120.0
"""Guard against a hang; vLLM takes some twenty seconds to end."""

POLL_S = 0.2

NUM_DEVICE_BLOCKS = 72
"""Two prompts and their answers."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What the server answered.

    Attributes:
        tokens: what was generated.
        num_cached_tokens: prompt tokens that were not computed, from the device or from kvtier.
    """

    tokens: tuple[int, ...]
    num_cached_tokens: int


class ServerProcess:
    """Starts a server when entered and ends it when left, by its process id.

    Args:
        model: folder of the checkpoint.
        settings: kvtier's settings.
        events_endpoint: where vLLM connects to publish its KV events.
        log: file for what the server prints.
        more: more arguments of the server.
        is_new_interpreter: start the command that a user types, with an interpreter for each process.
    """

    def __init__(
        self,
        model: str,
        settings: dict[str, Any],  # Any: a user's JSON
        events_endpoint: str,
        log: Path,
        more: Sequence[str] = (),
        *,
        is_new_interpreter: bool = False,
    ) -> None:
        transfer_config = {
            "kv_connector": "KVTierConnector",  # found by the entry point alone
            "kv_role": "kv_both",
            # An audited hit is computed, and most tests count what is loaded.
            "kv_connector_extra_config": {"audit_ratio": 0} | settings,
        }
        events_config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events_endpoint}
        self._arguments = [
            *("--model", model, "--served-model-name", "model", "--host", "127.0.0.1", "--dtype", "float32"),
            *("--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"),
            *("--max-model-len", str(MAX_MODEL_TOKENS), "--max-num-batched-tokens", str(CHUNK_TOKENS)),
            *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(NUM_DEVICE_BLOCKS)),
            # Without it vLLM kills its engine at once, and blocks on their way to a tier are lost.
            *("--shutdown-timeout", "60"),
            *("--kv-transfer-config", json.dumps(transfer_config)),
            *("--kv-events-config", json.dumps(events_config)),
            *more,
        ]
        self._log = log
        self._python_path = install_entry_points(log.parent)
        self._is_new_interpreter = is_new_interpreter

    def __enter__(self) -> "ServerProcess":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            AssertionError: it ended or never answered; the message is the end of its log.
        """
        self._port = free_port()
        arguments = [*self._arguments, "--port", str(self._port)]
        begin = ServerCommand if self._is_new_interpreter else ForkedServer
        self._process: ServerCommand | ForkedServer = begin(arguments, self._log, self._python_path)
        end_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_healthy():
            if not self._process.is_alive() or time.monotonic() > end_s:
                self.stop()
                raise AssertionError(self._log.read_text(errors="replace")[-4000:])
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End the server as an operator does, and all of its processes if it does not obey."""
        try:
            self._process.terminate()
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            if self._process.is_alive():
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def restart(self) -> None:
        """End the server and start a new one with the same arguments."""
        self.stop()
        self.start()

    def ask(self, prompt: list[int], *, replica: int | None = None, **more: Any) -> HttpAnswer:
        """Let the server, or one of its replicas, continue a prompt of token ids; ``more`` is a client's JSON."""
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        answer = self.post("/v1/completions", body, headers)
        details = answer["usage"]["prompt_tokens_details"]
        return HttpAnswer(tuple(answer["choices"][0]["token_ids"]), details["cached_tokens"])

    def wait_for_blocks(self, folder: Path, num_blocks: int) -> None:
        """Wait until the fs tier in ``folder`` has written so many blocks: it writes beside the server's answers."""
        end_s = time.monotonic() + REQUEST_TIMEOUT_S
        while len(stored_blocks(folder)) < num_blocks:
            assert time.monotonic() < end_s, f"{folder} never gets {num_blocks} blocks"
            time.sleep(POLL_S)

    def forget_device(self) -> None:
        """Empty the device's prefix cache: what is found afterwards comes from kvtier."""
        assert self.post("/reset_prefix_cache") == {"success": True}

    def post(
        self,
        path: str,
        body: dict[str, Any] | None = None,  # Any: JSON
        headers: Mapping[str, str] | None = None,
    ) -> Any:  # Any: JSON
        """Send a request and return the JSON of its answer."""
        request = urllib.request.Request(  # noqa: S310 - our own server on this host
            self._url(path),
            json.dumps(body or {}).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:  # noqa: S310
            return json.loads(response.read() or b"null")

    def get(self, path: str) -> Any:  # Any: JSON
        """Return the JSON of a page."""
        with urllib.request.urlopen(self._url(path), timeout=REQUEST_TIMEOUT_S) as response:  # noqa: S310
            return json.loads(response.read())

    def metrics(self, name: str, label: str) -> dict[str, float]:
        """Return the samples of one family on the metrics page, by the value of one label."""
        with urllib.request.urlopen(self._url("/metrics"), timeout=REQUEST_TIMEOUT_S) as response:  # noqa: S310
            page = response.read().decode()
        families = text_string_to_metric_families(page)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return {sample.labels[label]: sample.value for sample in samples}

    @property
    def place(self) -> str:
        """Host and port of the server."""
        return f"127.0.0.1:{self._port}"

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self._url("/health"), timeout=REQUEST_TIMEOUT_S):  # noqa: S310
                return True
        except OSError:
            return False

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self._port}{path}"


ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",  # as in engine_imports.py
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache, /sleep
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "PYTHONHASHSEED": "0",
}
MODULE = "vllm.entrypoints.openai.api_server"
"""What "vllm serve" runs; the command itself asks for a package named vllm, and this one is vllm-cpu."""


class ServerCommand:
    """The command, in a process group of its own, so that none of its processes can be left behind."""

    def __init__(self, arguments: Sequence[str], log: Path, python_path: str) -> None:
        environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path}
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, *arguments],
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.terminate = self._process.terminate
        self.wait = self._process.wait

    def is_alive(self) -> bool:
        """Return whether it has not ended yet."""
        return self._process.poll() is None


class ForkedServer:
    """The same, forked from a process that has imported vLLM."""

    def __init__(self, arguments: Sequence[str], log: Path, python_path: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([ENGINE_IMPORTS])
        self._process = context.Process(target=serve, args=(arguments, log, python_path))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.terminate = self._process.terminate
        self.wait = self._process.join
        self.is_alive = self._process.is_alive


def serve(arguments: Sequence[str], log: Path, python_path: str) -> None:
    """Be the server."""
    os.setsid()
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(ENVIRONMENT)
    sys.path[:0] = python_path.split(os.pathsep)
    sys.argv = ["vllm", *arguments]
    fork_workers()
    runpy.run_module(MODULE, run_name="__main__")
