"""The secondary tier in an object store.

It decides what to ask of the store and never asks it on the scheduler's thread. One bucket serves any number of
engines and models; each namespace has its own names under a prefix, and what lies under it shares one capacity.
"""

import time
from collections.abc import Callable
from pathlib import Path

from kvtier.config import OffloadingConfig
from kvtier.tiering.kit.backend import rows_of
from kvtier.tiering.kit.envelope import ENVELOPE_BYTES
from kvtier.tiering.kit.health import Counters
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys
from kvtier.tiering.obj.client import Client
from kvtier.tiering.obj.evictor import Evictor
from kvtier.tiering.obj.group import SealedRows
from kvtier.tiering.obj.layout import ObjNamespace
from kvtier.tiering.obj.settings import (
    DEFAULT_BLOCKS_PER_OBJECT,
    DEFAULT_NUM_THREADS,
    DEFAULT_PREFIX,
    DEFAULT_TIMEOUT_S,
    parse_settings,
)
from kvtier.tiering.obj.store import ObjBlockStore

TIER_TYPE = "obj"

POSITIVE_TTL_S = 60.0
"""Seconds for which "held" is believed. Shorter pays a request and a round trip for a block that is still there; longer
promises for longer what another instance has deleted, which costs a failed load."""

COUNTS = ("hits", "absent", "damaged", "foreign", "loaded_bytes", "stored_blocks", "stored_bytes", "existed")
CAPACITY_COUNTS = ("declined", "evicted", "evicted_bytes", "failed_passes")


class ObjTier(ThreadedTier[ObjNamespace]):
    """Objects in a bucket that any number of engines may share.

    Args:
        config: what the engine said of itself.
        primary_kv_view: the primary's rows, writable, shape (num_blocks, row_stride), format 'b'.
        url: ``s3://bucket``, ``gs://bucket``, ``az://container``; to try it out ``file:///directory``, or
            ``memory://``, which nobody shares; ``https://host`` for a server that takes PUT.
        prefix: what the names of objects begin with.
        capacity_bytes: the most that objects under the prefix may take, over all namespaces and instances; None
            leaves it to the store.
        blocks_per_object: the most blocks of one store call that share an object.
        timeout_s: seconds for one request.
        num_threads: requests that move blocks at the same time.
        endpoint: URL of a server that speaks the service's protocol; None takes the service's own.
        region: of the bucket; None leaves it to the environment.
        allow_http: whether blocks may go over the network unencrypted.
        ca_file: PEM file of certificates that are trusted besides the system's.
        clock: seconds, monotonic.

    Raises:
        ConfigError: a value that cannot work.
        MissingExtraError: the client library is not installed.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        *,
        url: str,
        prefix: str = DEFAULT_PREFIX,
        capacity_bytes: int | str | None = None,
        blocks_per_object: int = DEFAULT_BLOCKS_PER_OBJECT,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        num_threads: int = DEFAULT_NUM_THREADS,
        endpoint: str | None = None,
        region: str | None = None,
        allow_http: bool = False,
        ca_file: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        require_lasting_keys(config, TIER_TYPE)
        rows = rows_of(primary_kv_view)
        own = parse_settings(
            url=url,
            prefix=prefix,
            capacity_bytes=capacity_bytes,
            blocks_per_object=blocks_per_object,
            timeout_s=timeout_s,
            num_threads=num_threads,
            endpoint=endpoint,
            region=region,
            allow_http=allow_http,
            ca_file=ca_file,
            row_bytes=rows.row_bytes,
        )
        client = Client(own, clock)
        counters = Counters(*COUNTS, *(CAPACITY_COUNTS if own.capacity_bytes else ()))
        keeper = None
        if own.capacity_bytes is not None:
            keeper = Evictor(client, own.place.root, own.capacity_bytes, counters)
            self.capacity_blocks = own.capacity_bytes // (ENVELOPE_BYTES + rows.row_bytes)
        block_store = ObjBlockStore(client, SealedRows(rows), own, keeper, counters)
        options = ThreadOptions(own.num_threads, own.blocks_per_object, POSITIVE_TTL_S)
        super().__init__(config, primary_kv_view, block_store, options, clock)

    @staticmethod
    def get_tier_type() -> str:
        return TIER_TYPE
