"""Hears what vLLM publishes about its KV blocks, over ZeroMQ.

It decodes nothing. vLLM listens itself where its endpoint has a wildcard, and connects where it is a plain address; the
subscriber does the other thing.
"""

from types import TracebackType
from typing import Self

import zmq

from kvtier.errors import ConfigError

MAX_MESSAGE_BYTES = 256 * 2**20
"""Of one step's events. Larger ones are no publisher's; a peer that sends them is cut off."""

MAX_QUEUED_MESSAGES = 10_000
"""Batches that wait here while the disk is slow; what comes beyond is lost, and counted as missing."""


class Subscriber:
    """A socket that hears one endpoint, as a context manager.

    Args:
        endpoint: such as ``tcp://127.0.0.1:5557``.
        is_bound: whether to listen there and let vLLM connect.

    Raises:
        ConfigError: there is no such endpoint.
    """

    def __init__(self, endpoint: str, *, is_bound: bool) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            (self._socket.bind if is_bound else self._socket.connect)(endpoint)
        except zmq.ZMQError as error:
            self.close()
            remedy = f"cannot be {'listened on' if is_bound else 'connected to'} ({error.strerror})"
            raise ConfigError(
                "--kv-events", endpoint, f"{remedy}: give one such as tcp://127.0.0.1:5557"
            ) from error

    def receive(self, timeout_s: float) -> list[bytes] | None:
        """Return the parts of the next message; None when none comes within ``timeout_s``."""
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return None
        return self._socket.recv_multipart()

    def close(self) -> None:
        """Stop listening; idempotent."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
