"""A Mooncake store: a master process, with this program as the provider of its memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtier.cli.demo.servers.program import ServerInfo, free_ports, is_free, run_program, running, wait_until
from kvtier.errors import MissingExtraError

try:
    import mooncake
    from mooncake.store import MooncakeDistributedStore
except ImportError as error:
    raise MissingExtraError("mooncake", "mooncake") from error

SEGMENT_BYTES = 2 * 2**30
"""Memory provided to the store. The default demo stores a tenth of it, and untouched pages cost nothing."""

LOOPBACK = {"MC_TCP_BIND_ADDRESS": "127.0.0.1", "MC_LOG_LEVEL": "ERROR"}
"""Without the first variable the client advertises another interface."""


@contextmanager
def serve(directory: Path) -> Iterator[ServerInfo]:
    """Run a master on free ports of the loopback interface and provide it with memory."""
    directory.mkdir(parents=True, exist_ok=True)
    port, metrics_port = free_ports(2)
    master = Path(mooncake.__file__).parent / "mooncake_master"
    command = [str(master), f"--rpc_port={port}", "--rpc_address=127.0.0.1"]
    command += ["--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}"]
    os.environ.update(LOOPBACK)
    with running(command, directory, os.environ) as process:
        wait_until(lambda: not is_free(port), process, "mooncake_master")
        store = provide_memory(f"127.0.0.1:{port}")
        try:
            # A demo on one machine, which ends: the engine's listeners live as long as its table takes.
            settings = {"master": f"127.0.0.1:{port}", "segment_bytes": 0, "allow_any_interface": True}
            yield ServerInfo(settings, LOOPBACK)
        finally:
            store.close()


def provide_memory(master: str) -> MooncakeDistributedStore:
    """Provide the store of ``master`` with memory and check that it accepts a value.

    Raises:
        SystemExit: it does not.
    """
    store = MooncakeDistributedStore()
    status = store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, 0, "tcp", "", master)
    value = np.ones(64, np.uint8)
    if status or store.register_buffer(value.ctypes.data, value.nbytes):
        raise SystemExit(f"the Mooncake store refuses memory: status {status}")
    if store.batch_put_from(["ready"], [value.ctypes.data], [value.nbytes]) != [0]:
        raise SystemExit("the Mooncake store takes no value")
    return store


if __name__ == "__main__":
    run_program(serve)
