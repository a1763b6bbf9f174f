"""The secondary tier on a Mooncake store: memory that many machines lend to each other behind one master.

It decides what to ask of the store and never asks on the scheduler's thread. Bytes go straight from and into the
primary's rows, which are registered with the client once. The store has no authentication: whoever reaches its master
or one of its processes may read and write what is in them, so it belongs on a network of its own.
"""

import time
from collections.abc import Callable

from kvtier.config import OffloadingConfig
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys
from kvtier.tiering.mooncake.client import MooncakeClient
from kvtier.tiering.mooncake.headers import HeaderPool
from kvtier.tiering.mooncake.native import TIER_TYPE
from kvtier.tiering.mooncake.settings import (
    DEFAULT_LOCAL_HOST,
    DEFAULT_NUM_REPLICAS,
    DEFAULT_NUM_THREADS,
    DEFAULT_TIMEOUT_S,
    parse_settings,
)
from kvtier.tiering.mooncake.store import MooncakeBlockStore, MooncakeNamespace

MAX_PART_BYTES = 16 * 2**20
"""Bytes that a thread moves in one call. Less pays for the master's answers more often; more keeps a load waiting
behind a store, and the time limit of a transfer is for all of them."""

MAX_PART_BLOCKS = 64
"""The same for very small blocks."""

POSITIVE_TTL_S = 2.0
"""Seconds for which "held" is believed. Asking for a block protects it from eviction for 5 seconds, so this is
true nearly always; more would promise blocks that are gone, less asks again for the same prefix."""


class MooncakeTier(ThreadedTier[MooncakeNamespace]):
    """Blocks in the memory of a Mooncake store.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        master: address of the store's master, ``host:port``.
        segment_bytes: memory that this engine contributes to the store; 0 only uses that of others.
        num_replicas: copies of each block, each on another provider as far as there are so many.
        local_host: the address at which other machines reach this process.
        protocol: ``"tcp"`` or ``"rdma"``.
        timeout_s: seconds for a call to the master, and for a transfer without progress.
        num_threads: threads that move blocks.
        clock: seconds, monotonic.

    Raises:
        ConfigError: a value that cannot work.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        *,
        master: str,
        segment_bytes: int | str = 0,
        num_replicas: int = DEFAULT_NUM_REPLICAS,
        local_host: str = DEFAULT_LOCAL_HOST,
        protocol: str = "tcp",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        num_threads: int = DEFAULT_NUM_THREADS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        own = parse_settings(
            master=master,
            segment_bytes=segment_bytes,
            num_replicas=num_replicas,
            local_host=local_host,
            protocol=protocol,
            timeout_s=timeout_s,
            num_threads=num_threads,
        )
        part_blocks = min(MAX_PART_BLOCKS, max(1, MAX_PART_BYTES // max(1, rows.row_bytes)))
        headers = HeaderPool(own.num_threads, part_blocks)
        client = MooncakeClient(own, (rows.flat, headers.memory), clock)
        options = ThreadOptions(
            own.num_threads, max_part_blocks=part_blocks, positive_ttl_s=POSITIVE_TTL_S, cuts_evenly=True
        )
        block_store = MooncakeBlockStore(client, rows, headers, clock)
        super().__init__(config, primary_kv_view, block_store, options, clock)

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE
