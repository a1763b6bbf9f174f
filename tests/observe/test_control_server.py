"""A client that sends garbage, half a line, too much or nothing is dropped, and the others are served."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.observe.controlled import GUARD_S, connect, is_dropped, read_line

from kvtier.errors import ControlError
from kvtier.observe.control_client import EngineConnection
from kvtier.observe.control_server import MAX_CLIENTS, REST_S, SILENCE_S, Ask, ControlServer
from kvtier.observe.control_wire import MAX_LINE_BYTES, Message, locked_folder
from kvtier.testing.clock import ManualClock


class Echo:
    """Returns each request, but for the one that never gets a reply."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.begun = threading.Event()

    def begin(self, request: Message) -> Ask:
        if request.get("do") == "refuse":
            raise ControlError("no")
        if request.get("do") == "fail":
            return EchoAsk(self, None, fails=True)
        self.begun.set()
        return EchoAsk(self, None if request.get("do") == "wait" else request)


class EchoAsk:
    """One of them."""

    def __init__(self, owner: Echo, reply: Message | None, *, fails: bool = False) -> None:
        self._owner = owner
        self._reply = reply
        self._fails = fails

    def poll(self) -> Message | None:
        if self._fails:
            raise ZeroDivisionError("a foreign tier's own")
        return self._reply

    def cancel(self) -> None:
        self._owner.cancelled.set()


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def server(folder: Path, echo: Echo, clock: ManualClock) -> Iterator[ControlServer]:
    served = ControlServer(folder, "engine", echo, clock=clock)
    yield served
    served.close()


def ask(client: socket.socket, line: bytes = b'{"n":1}\n') -> Message:
    client.sendall(line)
    return read_line(client)


def serves(path: Path) -> bool:
    with connect(path) as client:
        return ask(client) == {"n": 1}


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_client_is_answered_line_by_line(server: ControlServer) -> None:
    with connect(server.path) as client:
        assert [ask(client, b'{"n":%d}\n' % n) for n in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_requests_sent_at_once_are_answered_in_order(server: ControlServer) -> None:
    with connect(server.path) as client:
        client.sendall(b"".join(b'{"n":%d}\n' % n for n in range(500)))
        received = b""
        while received.count(b"\n") < 500:
            received += client.recv(65536)

    assert received == b"".join(b'{"n":%d}\n' % n for n in range(500))


def test_a_refusal_is_a_reply_and_the_client_stays(server: ControlServer) -> None:
    with connect(server.path) as client:
        assert ask(client, b'{"do":"refuse"}\n') == {"ok": False, "error": "no"}
        assert ask(client) == {"n": 1}


def test_a_failure_is_its_client_s_alone(server: ControlServer) -> None:
    with connect(server.path) as client:
        reply = ask(client, b'{"do":"fail"}\n')
        assert reply == {"ok": False, "error": "ZeroDivisionError: a foreign tier's own"}
    assert serves(server.path)


@pytest.mark.parametrize("garbage", [b"\0\xff" * 100 + b"\n", b"[1,2]\n", b"GET / HTTP/1.1\r\n\r\n", b"{\n"])
def test_garbage_is_dropped(server: ControlServer, garbage: bytes) -> None:
    with connect(server.path) as client:
        client.sendall(garbage)
        assert is_dropped(client)
    assert serves(server.path)


def test_a_hundred_megabytes_are_dropped_after_the_first(server: ControlServer) -> None:
    piece, num_sent = b"x" * 2**16, 0
    with connect(server.path) as client, suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(100 * 2**20 // len(piece)):
            client.sendall(piece)
            num_sent += len(piece)
    # What the kernel buffers comes on top of what the server reads.
    assert num_sent < MAX_LINE_BYTES + 2**22
    assert serves(server.path)


@pytest.mark.parametrize("beginning", [b"", b'{"n":', b'{"n":1}'])
def test_silence_and_half_a_line_are_dropped_in_time(
    server: ControlServer, clock: ManualClock, beginning: bytes
) -> None:
    with connect(server.path) as silent:
        silent.sendall(beginning)
        assert serves(server.path)
        clock.advance(SILENCE_S + 1)
        server.wake()
        assert is_dropped(silent)
    assert serves(server.path)


def test_a_client_that_does_not_read_is_dropped_in_time(server: ControlServer, clock: ManualClock) -> None:
    with connect(server.path) as client:
        client.settimeout(0.0)
        request = b'{"x":"' + b"x" * 500_000 + b'"}\n'
        with suppress(BlockingIOError):
            while True:
                client.send(request)
        assert serves(server.path)
        clock.advance(SILENCE_S + 1)
        server.wake()
        client.settimeout(GUARD_S)
        assert is_dropped(client)
    assert serves(server.path)


def test_one_client_more_takes_the_place_of_the_one_that_was_idle_longest(
    server: ControlServer, clock: ManualClock
) -> None:
    clients = []
    try:
        for _ in range(MAX_CLIENTS):
            clients.append(EngineConnection(server.path, GUARD_S))
            assert clients[-1].ask("echo", n=1, ok=True)["n"] == 1
            clock.advance(SILENCE_S / 100)
        with EngineConnection(server.path, GUARD_S) as one_more:
            assert one_more.ask("echo", n=2, ok=True)["n"] == 2
        for number, client in enumerate(clients):  # the first has lost its place, and connects again
            assert client.ask("echo", n=number, ok=True)["n"] == number
    finally:
        for client in clients:
            client.close()


def test_where_each_client_waits_for_a_reply_one_more_hears_that(
    server: ControlServer, echo: Echo, clock: ManualClock
) -> None:
    clients = [socket.socket(socket.AF_UNIX) for _ in range(MAX_CLIENTS)]
    try:
        for client in clients:
            client.connect(str(server.path))
            client.settimeout(GUARD_S)
            echo.begun.clear()
            client.sendall(b'{"do":"wait"}\n')
            assert echo.begun.wait(GUARD_S)
        with (
            pytest.raises(ControlError, match="serves 16 clients at a time, and each of them waits"),
            EngineConnection(server.path, GUARD_S) as one_more,
        ):
            one_more.ask("echo", n=2, ok=True)
        clients[0].close()
        assert echo.cancelled.wait(GUARD_S)
        assert serves(server.path)
    finally:
        for client in clients:
            client.close()
    clock.advance(SILENCE_S + 1)


def test_another_user_s_process_is_refused(folder: Path, echo: Echo) -> None:
    server = ControlServer(folder, "engine", echo, peer_uid=lambda _: os.geteuid() + 1)
    try:
        with connect(server.path) as client, suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(b'{"n":1}\n')
            assert client.recv(65536) == b""
        assert not echo.begun.is_set()
    finally:
        server.close()


def test_the_socket_is_its_user_s_alone(server: ControlServer) -> None:
    assert server.path.stat().st_mode & 0o777 == 0o600


def test_a_request_is_dropped_with_its_client(server: ControlServer, echo: Echo) -> None:
    with connect(server.path) as client:
        client.sendall(b'{"do":"wait"}\n')
        assert echo.begun.wait(GUARD_S)

    assert echo.cancelled.wait(GUARD_S)


def test_closing_ends_thread_clients_and_socket(folder: Path, echo: Echo) -> None:
    num_before = count_descriptors()
    server = ControlServer(folder, "engine", echo)
    with connect(server.path) as client:
        client.sendall(b'{"do":"wait"}\n')
        assert echo.begun.wait(GUARD_S)
        server.close()
        assert is_dropped(client)
    server.close()

    assert not server.path.exists()
    assert echo.cancelled.is_set()
    assert [thread for thread in threading.enumerate() if thread.name == "kvtier-control"] == []
    assert count_descriptors() == num_before


def test_many_clients_leave_no_descriptor(server: ControlServer) -> None:
    assert serves(server.path)
    num_before = count_descriptors()
    for garbage in (b"", b"x\n", b'{"n":1}\n', b'{"do":"wait"}\n') * 20:
        with connect(server.path) as client:
            client.sendall(garbage)
    assert serves(server.path)
    with connect(server.path) as last:  # its reply comes after the server has seen the others' ends
        assert ask(last) == {"n": 1}
        while count_descriptors() > num_before + 2:
            assert ask(last) == {"n": 1}


def test_a_dead_process_s_socket_is_replaced(folder: Path, echo: Echo) -> None:
    path = folder / "engine.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    server = ControlServer(folder, "engine", echo)
    try:
        assert server.path == path
        assert serves(path)
    finally:
        server.close()


def test_two_engines_of_one_name_have_two_sockets(folder: Path, echo: Echo) -> None:
    first, second = ControlServer(folder, "engine", echo), ControlServer(folder, "engine", echo)
    try:
        assert first.path != second.path
        assert serves(first.path)
        first.close()
        assert serves(second.path)
        assert not first.path.exists()
    finally:
        first.close()
        second.close()


def test_a_socket_that_another_engine_has_made_meanwhile_stays(folder: Path, echo: Echo) -> None:
    first = ControlServer(folder, "engine", echo)
    first.path.unlink()
    second = ControlServer(folder, "engine", echo)
    try:
        first.close()
        assert serves(second.path)
    finally:
        second.close()


def test_a_folder_that_stays_locked_is_an_error_and_leaves_nothing(folder: Path, echo: Echo) -> None:
    num_before = count_descriptors()
    with locked_folder(folder), pytest.raises(ControlError, match="stays locked"):
        ControlServer(folder, "engine", echo)

    assert list(folder.iterdir()) == []
    assert count_descriptors() == num_before


def test_a_forked_child_does_not_keep_a_dead_engine_s_socket_open(folder: Path, echo: Echo) -> None:
    server = ControlServer(folder, "engine", echo)
    identity = os.fstat(server._listener.fileno()).st_ino

    def close_and_report(write_end: int) -> None:
        fds = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
        inodes = [os.fstat(fd).st_ino for fd in fds if is_open(fd)]
        os.write(write_end, b"1" if identity in inodes else b"0")

    has_socket = run_in_fork(close_and_report)
    server.close()

    assert has_socket == b"0"


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def run_in_fork(work: Callable[[int], None]) -> bytes:
    """Run ``work`` in a forked child and return the byte that it writes."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(write_end)
        finally:
            os._exit(0)
    os.close(write_end)
    answer = os.read(read_end, 1)
    os.close(read_end)
    os.waitpid(child, 0)
    return answer


def test_clients_in_a_loop_leave_the_interpreter_to_the_engine(folder: Path, clock: ManualClock) -> None:
    """A round that takes a twentieth of a second is followed by nine times as long a rest."""
    rests: list[float] = []
    server = ControlServer(folder, "engine", Slow(clock), clock=clock, pause=rests.append)
    try:
        with connect(server.path) as client:
            for _ in range(2):  # the rest of the first is over when the second is answered
                assert ask(client) == {"n": 1}
    finally:
        server.close()

    assert pytest.approx(9 * 0.05) in rests
    assert min(rests) == REST_S


class Slow(Echo):
    """Takes a twentieth of a second of the clock for each request."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def begin(self, request: Message) -> Ask:
        self._clock.advance(0.05)
        return super().begin(request)
