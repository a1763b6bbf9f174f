"""Wires between a tier and a real server: one that is cut in the middle of a reply, one on which replies trickle."""

import socket
import threading
from collections.abc import Callable


class CuttingProxy:
    """Passes everything on until so many bytes have come back from the server, then closes.

    Args:
        server_port: of the real server.
        max_reply_bytes: bytes of replies on one connection.
    """

    def __init__(self, server_port: int, max_reply_bytes: int) -> None:
        self._server_port = server_port
        self._max_reply_bytes = max_reply_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._server_port))
            threading.Thread(target=self._pass, args=(near, far, None), daemon=True).start()
            threading.Thread(target=self._answer, args=(far, near), daemon=True).start()

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        self._pass(server, client, self._max_reply_bytes)

    def _pass(self, source: socket.socket, target: socket.socket, num_left: int | None) -> None:
        try:
            while num_left != 0 and (
                piece := source.recv(65_536 if num_left is None else min(65_536, num_left))
            ):
                target.sendall(piece)
                num_left = None if num_left is None else num_left - len(piece)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        if num_left is not None:  # one of the two threads closes both
            source.close()
            target.close()


class TricklingProxy(CuttingProxy):
    """Passes replies on a few bytes at a time.

    Args:
        server_port: of the real server.
        piece_bytes: how many.
        rest: called after each piece.
    """

    def __init__(self, server_port: int, piece_bytes: int, rest: Callable[[], None]) -> None:
        self._piece_bytes = piece_bytes
        self._rest = rest
        super().__init__(server_port, max_reply_bytes=0)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with server, client:
            try:
                while piece := server.recv(self._piece_bytes):
                    client.sendall(piece)
                    self._rest()
            except OSError:
                return
