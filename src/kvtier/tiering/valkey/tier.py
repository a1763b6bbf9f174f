"""The secondary tier on a Valkey or Redis server or cluster.

It never talks to a server on the scheduler's thread: lookups are answered from memory, jobs and questions are handed
to threads. One server serves any number of engines and models; it decides what to evict.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.config import OffloadingConfig
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys
from kvtier.tiering.valkey.cluster import Cluster
from kvtier.tiering.valkey.errors import TIER_TYPE
from kvtier.tiering.valkey.servers import SingleServer
from kvtier.tiering.valkey.settings import (
    DEFAULT_NUM_THREADS,
    DEFAULT_TIMEOUT_S,
    DEFAULT_TTL_S,
    parse_settings,
)
from kvtier.tiering.valkey.store import ValkeyBlockStore, ValkeyNamespace

POSITIVE_TTL_S = 2.0
"""Seconds for which a block is believed to be held. Longer promises more blocks that were evicted meanwhile, each of
which costs a load that finds nothing; shorter asks again for the same prefix."""

MAX_PART_BYTES = 16 * 2**20
"""Bytes of rows that a thread moves at a stretch, as one batch. Less asks the server more often what it holds; more
keeps a load waiting behind a store."""

MAX_PART_BLOCKS = 64
"""The same for very small blocks, so that a job of them is shared by several threads."""


class ValkeyTier(ThreadedTier[ValkeyNamespace]):
    """One value per block on a server, or a cluster of them, that any number of engines may share.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        url: ``redis://`` or ``valkey://``, with TLS ``rediss://`` or ``valkeys://``; user, password and database in
            it, or the first two in KVTIER_VALKEY_USERNAME and KVTIER_VALKEY_PASSWORD.
        cluster: whether the server is a node of a cluster.
        ttl_s: seconds after its last use that a block is kept; 0 or None for ever.
        timeout_s: seconds without a byte after which a server counts as hung.
        ca_file: certificates that the server's must be signed by; None takes the system's.
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
        url: str,
        cluster: bool = False,
        ttl_s: float | None = DEFAULT_TTL_S,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        ca_file: str | Path | None = None,
        num_threads: int = DEFAULT_NUM_THREADS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        own = parse_settings(
            url=url,
            cluster=cluster,
            ttl_s=ttl_s,
            timeout_s=timeout_s,
            ca_file=ca_file,
            num_threads=num_threads,
            environ=os.environ,
        )
        servers = Cluster(own, clock) if own.cluster else SingleServer(own, clock)
        options = ThreadOptions(
            own.num_threads,
            max_part_blocks=min(MAX_PART_BLOCKS, max(1, MAX_PART_BYTES // max(1, rows.row_bytes))),
            positive_ttl_s=POSITIVE_TTL_S,
            cuts_evenly=True,
        )
        block_store = ValkeyBlockStore(servers, rows, own.ttl_s)
        super().__init__(config, primary_kv_view, block_store, options, clock)

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE
