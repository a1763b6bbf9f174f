"""Ports for servers of tests, on loopback: those that no other process of the tests chooses, and no client is given.

A port that the system hands out is free only until somebody connects from it; minutes may pass on a busy machine
before the server for which it was chosen is listening there.
"""

import os
import socket
import time

FIRST_PORT = 10_000
"""With those of all lanes below what the system hands out, so that a port that was free when it was chosen still is."""

OTHER_PORTS = (1, 10_000)
"""How far above its own a server may take further ports: one for TLS or a second rank, one for its peers."""

LANES, LANE_PORTS = 4, 3_000
"""Processes that share the tests choose from ports of their own: one that is free may be chosen by two at a time."""

_first = FIRST_PORT + LANE_PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % LANES)
_ports = iter(range(_first + time.time_ns() % 1_000, _first + LANE_PORTS, 2))


def free_port() -> int:
    """Return a port on which nobody listens, nor on the others that a server there may take."""
    return next(port for port in _ports if all(_is_free(port + above) for above in (0, *OTHER_PORTS)))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
