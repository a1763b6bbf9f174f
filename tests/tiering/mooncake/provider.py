"""A process that lends memory to a Mooncake store.

    python tests/tiering/mooncake/provider.py MASTER SEGMENT_BYTES

It says "ready" when a value has really been stored, and lives until its standard input ends.
"""

import os
import sys

import mooncake.store
import numpy as np


def lend() -> None:
    """Lend memory to the store until standard input ends."""
    address, segment_bytes = sys.argv[1:]
    store = mooncake.store.MooncakeDistributedStore()
    memory = np.ones(64, np.uint8)
    is_ready = store.setup("127.0.0.1", "P2PHANDSHAKE", int(segment_bytes), 0, "tcp", "", address) == 0
    is_ready = is_ready and store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    name = f"ready/{os.getpid()}"
    is_ready = is_ready and store.batch_put_from([name], [memory.ctypes.data], [memory.nbytes]) == [0]
    print("ready" if is_ready else "failed", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    lend()
