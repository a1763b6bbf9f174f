"""What the author of a tier builds on, as one import: ``from kvtier.tiering.kit import ThreadedTier, BlockStore``.

A tier with threads subclasses ``ThreadedTier`` and gives it a ``BlockStore``, which reads and writes blocks in the
backend; lookups, queues, deadlines and outages are done.
"""

from kvtier.settings import parse_settings, setting
from kvtier.tiering.kit.backend import BlockStore, Counters, Rows, ThreadPages, rows_of
from kvtier.tiering.kit.block_format import BlockFormat, format_of
from kvtier.tiering.kit.disk import checksum_ahead
from kvtier.tiering.kit.envelope import HeaderCheck, check_block, make_header
from kvtier.tiering.kit.eviction_log import EvictionLog
from kvtier.tiering.kit.health import BackendHealth
from kvtier.tiering.kit.io_pool import IOPool, TransferOutcome
from kvtier.tiering.kit.lookup import AsyncLookup
from kvtier.tiering.kit.threaded_tier import ThreadedTier, ThreadOptions, require_lasting_keys

__all__ = [
    "AsyncLookup",
    "BackendHealth",
    "BlockFormat",
    "BlockStore",
    "Counters",
    "EvictionLog",
    "HeaderCheck",
    "IOPool",
    "Rows",
    "ThreadOptions",
    "ThreadPages",
    "ThreadedTier",
    "TransferOutcome",
    "check_block",
    "checksum_ahead",
    "format_of",
    "make_header",
    "parse_settings",
    "require_lasting_keys",
    "rows_of",
    "setting",
]
