"""The thread that serves an engine's control socket: one JSON object a line, from the same user only.

It never touches the engine: a ``RequestHandler`` turns each request into an ``Ask``, which gets its reply now or later.
What clients can cost is bounded. There are at most ``MAX_CLIENTS``, each with one open request. One more takes the
place of the client that has been idle longest, which connects again for its next request; where all of them wait for a
reply it hears that. A line has at most ``MAX_LINE_BYTES``; a client that sends half a line, nothing, garbage, or does
not read its reply is dropped; and the thread rests between two rounds, so that a client in a loop does not take the
interpreter from the engine.
"""

import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from kvtier.errors import ControlError, KVTierError
from kvtier.observe.control_wire import (
    MAX_LINE_BYTES,
    Message,
    decode,
    encode,
    is_dead,
    locked_folder,
    make_socket_name,
    read_peer_uid,
    short_path,
)

logger = logging.getLogger(__name__)

MAX_CLIENTS = 16
"""Connections at a time. A person and a few scripts need less; each may hold a line of a megabyte."""

BUSY = (
    f"the engine serves {MAX_CLIENTS} clients at a time, and each of them waits for a reply: try again soon"
)
"""What one more client hears then."""

SILENCE_S = 10.0
"""Seconds within which a client completes a line, or reads its reply. Less would drop one on a loaded machine."""

POLL_S = 0.02
"""Seconds between two looks at open requests, while there are any."""

REST_S = 0.002
REST_FACTOR = 9
MAX_REST_S = 1.0
"""Pause after each round: nine times what the round took, within these bounds. So clients in a loop take a tenth of the
interpreter's time, and not half of it from the engine."""

READ_BYTES = 2**16
"""Bytes read of one client in a round."""

BACKLOG = 8
"""Connections that wait to be accepted; the kernel refuses more."""

MAX_NAMES = 100
"""Living engines of one instance id that each have a socket."""

END_S = 5.0
"""Seconds that ``close`` waits for the thread, which rests for milliseconds."""


class Ask(Protocol):
    """A request that waits for its reply. Used from the server's thread."""

    def poll(self) -> Message | None:
        """Return the reply, None while there is none."""

    def cancel(self) -> None:
        """Drop the request: its client is gone."""


class RequestHandler(Protocol):
    """What answers requests. Used from the server's thread."""

    def begin(self, request: Message) -> Ask:
        """Start to answer a request.

        Raises:
            ControlError: it cannot be answered; the message is the reply.
        """


class _Client:
    """One connection.

    Attributes:
        connection: non-blocking.
        deadline_s: the clock's reading at which it is dropped unless something has been completed. The earliest of idle
            clients has been idle longest.
        received: bytes of lines that are not answered yet.
        unsent: bytes of replies.
        ask: the open request.
    """

    def __init__(self, connection: socket.socket, deadline_s: float) -> None:
        self.connection = connection
        self.deadline_s = deadline_s
        self.received = bytearray()
        self.unsent = bytearray()
        self.ask: Ask | None = None

    @property
    def has_request(self) -> bool:
        """Whether its next request can begin."""
        return self.ask is None and not self.unsent and b"\n" in self.received

    @property
    def is_idle(self) -> bool:
        """Whether it waits for nothing and nothing of it has arrived."""
        return self.ask is None and not self.unsent and not self.received


class ControlServer:
    """Listens on a socket until it is closed.

    The thread alone uses the clients and the selector. ``close`` and ``wake`` may be called from any thread.

    Args:
        folder: where sockets are.
        instance_id: the engine's.
        handler: answers requests.
        clock: seconds, monotonic.
        pause: waits for that many seconds.
        peer_uid: returns the user at the other end of a connection.

    Attributes:
        path: the socket.

    Raises:
        ControlError: the folder stays locked, or too many living engines have this id.
        OSError: the socket cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        instance_id: str,
        handler: RequestHandler,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        peer_uid: Callable[[socket.socket], int] = read_peer_uid,
    ) -> None:
        self._handler = handler
        self._clock = clock
        self._pause = pause
        self._peer_uid = peer_uid
        self._clients: dict[int, _Client] = {}
        self._is_closing = False
        with ExitStack() as undo:
            self._listener, self.path = _listen(folder, instance_id)
            undo.callback(self._listener.close)
            found = self.path.stat()
            self._identity = (found.st_dev, found.st_ino)
            self._woken, self._waker = socket.socketpair()
            undo.callback(self._woken.close)
            undo.callback(self._waker.close)
            self._selector = selectors.DefaultSelector()
            for end in (self._woken, self._waker):
                end.settimeout(0.0)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            undo.pop_all()
        _servers.add(self)
        self._thread = threading.Thread(target=self._run, name="kvtier-control", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Make the thread look at its open requests now. Never blocks."""
        with suppress(OSError):  # its buffer is full, so it wakes anyway; or it has ended
            self._waker.send(b"\0")

    def close_soon(self) -> None:
        """Do what ``close`` does, without waiting for the thread."""
        self._is_closing = True
        self.wake()

    def close(self) -> None:
        """End the thread and remove the socket; idempotent. Open requests end without a reply."""
        self.close_soon()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)

    def close_in_child(self) -> None:
        """Close what a forked child has inherited: otherwise it would keep a dead engine's socket open."""
        for client in self._clients.values():
            client.connection.close()
        self._close_own()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._do_round()
        except Exception:  # thread top: without its control socket an engine serves on
            logger.exception("the control socket %s ends", self.path)
        finally:
            self._end()

    def _do_round(self) -> None:
        ready = self._selector.select(self._timeout_s())
        began_s = self._clock()
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(READ_BYTES)
            elif (client := self._clients.get(key.fd)) is not None and client.connection is key.fileobj:
                self._serve(client, events)
        for client in list(self._clients.values()):
            if client.ask is not None:
                self._poll(client)
            elif client.has_request:
                self._begin(client)  # one in a round, however many it has sent
            elif self._clock() >= client.deadline_s:
                self._drop(client)
        if self._clients and not self._is_closing:
            took_s = self._clock() - began_s
            self._pause(min(MAX_REST_S, max(REST_S, REST_FACTOR * took_s)))

    def _timeout_s(self) -> float | None:
        if not self._clients:
            return None
        if any(client.ask is not None for client in self._clients.values()):
            return POLL_S
        if any(client.has_request for client in self._clients.values()):
            return 0.0
        first_s = min(client.deadline_s for client in self._clients.values())
        return max(0.0, first_s - self._clock())

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it is gone again, or the process has no descriptor left
            self._pause(POLL_S)
            return
        try:
            is_own = self._peer_uid(connection) == os.geteuid()
        except OSError:
            is_own = False
        if not is_own:
            connection.close()
            return
        connection.settimeout(0.0)
        if len(self._clients) >= MAX_CLIENTS and not self._make_room():
            with suppress(OSError):  # it is gone again
                connection.send(encode({"ok": False, "error": BUSY}))
            connection.close()
            return
        self._clients[connection.fileno()] = _Client(connection, self._clock() + SILENCE_S)
        self._selector.register(connection, selectors.EVENT_READ)

    def _make_room(self) -> bool:
        """Drop the client that has been idle longest; False where each has sent something or waits for a reply."""
        idle = [client for client in self._clients.values() if client.is_idle]
        if idle:
            self._drop(min(idle, key=lambda client: client.deadline_s))
        return bool(idle)

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(client)
            if events & selectors.EVENT_READ:
                self._receive(client)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)

    def _receive(self, client: _Client) -> None:
        data = client.connection.recv(READ_BYTES)
        client.received += data
        # A client that has hung up needs no reply; one that sends more than a line's length has no command.
        if not data or len(client.received) > MAX_LINE_BYTES:
            self._drop(client)

    def _begin(self, client: _Client) -> None:
        line, _, client.received = client.received.partition(b"\n")
        client.deadline_s = self._clock() + SILENCE_S
        try:
            request = decode(line)
        except ControlError:
            self._drop(client)
            return
        try:
            client.ask = self._handler.begin(request)
        except KVTierError as error:
            self._reply(client, {"ok": False, "error": str(error)})
        else:
            self._poll(client)

    def _poll(self, client: _Client) -> None:
        try:
            reply = None if client.ask is None else client.ask.poll()
        except Exception as error:  # noqa: BLE001 - foreign tiers count too; a failure costs its own client
            reply = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        if reply is not None:
            client.ask = None
            client.deadline_s = self._clock() + SILENCE_S
            self._reply(client, reply)

    def _reply(self, client: _Client, reply: Message) -> None:
        client.unsent += encode(reply)
        try:
            self._send(client)
        except OSError:
            self._drop(client)

    def _send(self, client: _Client) -> None:
        with suppress(BlockingIOError):
            while client.unsent:
                del client.unsent[: client.connection.send(client.unsent)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
        self._selector.modify(client.connection, wanted)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.connection.fileno(), None) is None:
            return
        if client.ask is not None:
            client.ask.cancel()
            client.ask = None
        self._selector.unregister(client.connection)
        client.connection.close()

    def _end(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        with suppress(OSError, ControlError), locked_folder(self.path.parent):
            found = self.path.lstat()
            if (found.st_dev, found.st_ino) == self._identity:
                self.path.unlink()
        _servers.discard(self)
        self._close_own()

    def _close_own(self) -> None:
        self._selector.close()
        for end in (self._listener, self._woken, self._waker):
            end.close()

    def __repr__(self) -> str:
        return f"ControlServer({self.path}, {len(self._clients)} clients)"


_servers: weakref.WeakSet[ControlServer] = weakref.WeakSet()


def _close_in_child() -> None:
    for server in list(_servers):
        with suppress(Exception):  # foreign state: the fork may have come at any moment of the thread
            server.close_in_child()
    _servers.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _listen(folder: Path, instance_id: str) -> tuple[socket.socket, Path]:
    """Return a listening socket and its path; the socket of a dead process is replaced."""
    with locked_folder(folder):
        for attempt in range(MAX_NAMES):
            path = folder / make_socket_name(instance_id, attempt)
            if os.path.lexists(path):
                if not is_dead(path):
                    continue
                path.unlink()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                with short_path(path) as name:
                    listener.bind(name)
                path.chmod(0o600)
                listener.listen(BACKLOG)
                listener.settimeout(0.0)
            except BaseException:
                listener.close()
                raise
            return listener, path
    raise ControlError(
        f"{MAX_NAMES} living engines have the id {instance_id!r}: give each its own instance_id"
    )
