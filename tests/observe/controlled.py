"""A scheduler half with real books and a control socket in a folder of the test's own."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.connector.fakes import (
    FakeRequest,
    FakeSpec,
    hash_tokens,
    make_config,
    make_first_step,
    report_jobs,
)

from kvtier.base import OffloadingManager
from kvtier.connector.common import OffloadingConnectorMetadata
from kvtier.connector.scheduler import OffloadingConnectorScheduler
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.engines.common.step import StepOutput
from kvtier.errors import ControlError
from kvtier.misses import RequestRecord
from kvtier.observe.control import EngineControl
from kvtier.observe.control_client import EngineConnection
from kvtier.observe.control_server import ControlServer, RequestHandler
from kvtier.observe.control_wire import Message

GUARD_S = 60.0
"""Against a hang only: no test waits that long unless something is broken."""

MakeServer = Callable[[RequestHandler], ControlServer]


@dataclass(frozen=True)
class GivenRecords:
    """Records that a test gives."""

    latest: tuple[RequestRecord, ...]


class Engine:
    """An engine whose steps the test makes, with a control socket.

    Args:
        folder: where the socket is.
        instance_id: the engine's.
        manager: which blocks are held.
        clock: seconds, monotonic.
        settings: further settings of the engine.
    """

    def __init__(
        self,
        folder: Path,
        instance_id: str = "engine",
        manager: OffloadingManager | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        **settings: object,
    ) -> None:
        self.manager = CPUOffloadingManager(16) if manager is None else manager
        config = replace(make_config(), extra_config={"instance_id": instance_id, **settings})
        self.hash_prompt = hash_tokens
        self.control = EngineControl(config, hash_tokens, clock=clock)
        self.control.listen(lambda handler: self._serve(folder, instance_id, handler))
        spec = FakeSpec(config, self.manager)
        self.half = OffloadingConnectorScheduler(spec, control=self.control)
        self._next_block = 0

    def _serve(self, folder: Path, instance_id: str, handler: RequestHandler) -> ControlServer:
        self.server = ControlServer(folder, instance_id, handler)
        return self.server

    def give_records(self, *records: RequestRecord) -> None:
        self.half.records = GivenRecords(records)  # type: ignore[assignment]  # only read by clients

    @property
    def path(self) -> Path:
        return self.server.path

    def step(self, step: StepOutput | None = None) -> OffloadingConnectorMetadata:
        return self.half.build_connector_meta(step or StepOutput())

    def store(self, req_id: str, tokens: list[int]) -> None:
        """Serve a request: its full blocks are in host memory afterwards."""
        request = FakeRequest(req_id, tokens)
        self.half.get_num_new_matched_tokens(request, 0)
        num_blocks = -(-len(tokens) // 4)
        blocks = list(range(self._next_block, self._next_block + num_blocks))
        self._next_block += num_blocks
        step = make_first_step(req_id, (blocks,), len(tokens))
        metadata = self.step(step)
        self.half.update_connector_output(report_jobs(metadata))
        self.half.request_finished(request)

    def ask(self, command: str, timeout_s: float = GUARD_S, /, **arguments: object) -> Message:
        with EngineConnection(self.path, GUARD_S) as connection:
            return connection.ask(command, timeout_s, **arguments)

    def close(self) -> None:
        self.half.shutdown()


class Background:
    """Makes a call on another thread, as a client beside a stepping engine."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.result: object = None
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except ControlError as error:
            self.result = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> object:
        self._thread.join(GUARD_S)
        assert not self.is_running
        return self.result


@contextmanager
def connect(path: Path) -> Iterator[socket.socket]:
    """Connect as a client that need not be kvtier's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))
        client.settimeout(GUARD_S)
        yield client


def read_line(client: socket.socket) -> Message:
    """Return the next reply."""
    received = b""
    while not received.endswith(b"\n"):
        data = client.recv(65536)
        assert data, "the server has hung up"
        received += data
    reply: Message = json.loads(received)
    return reply


def is_dropped(client: socket.socket) -> bool:
    """Wait until the server hangs up; what it sends before is read and ignored."""
    try:
        while client.recv(65536):
            pass
    except (ConnectionResetError, BrokenPipeError):
        return True
    return True
