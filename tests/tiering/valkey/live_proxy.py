"""A wire between a tier and a real server that can be cut in the middle of a reply."""

import socket
import threading


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
            threading.Thread(target=self._pass, args=(far, near, self._max_reply_bytes), daemon=True).start()

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
