"""What the process of one rank does in the tests of several: a backend, a pool, and calls from the test's process."""

import hashlib
from typing import Any

from tests.engines.sglang.pools import HeadsPool, LatentPool, SmallPool

_opened: dict[str, Any] = {}


def open_backend(values: dict[str, Any], *, has_heads: bool) -> None:
    """Open this process' backend; the values are those of SGLang's description."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from kvtier.engines.sglang import KVTierStorage

    pool: SmallPool = HeadsPool() if has_heads else LatentPool()
    backend = KVTierStorage(HiCacheStorageConfig(**values), {})
    backend.register_mem_pool_host(pool)
    backend.on_host_pools_registered()
    _opened.update(backend=backend, pool=pool)


def store(keys: list[str], seed: int) -> tuple[list[bool], list[str]]:
    """Store pages of this rank's own bytes; return the answers and the pages' digests."""
    backend, pool = _opened["backend"], _opened["pool"]
    pool.fill(seed)
    answers = backend.batch_set_v1(keys, pool.slots(*range(len(keys))))
    return answers, [_digest(pool, number) for number in range(len(keys))]


def load(keys: list[str]) -> tuple[int, list[str | None]]:
    """Look pages up and load them; return how many are found and the digests of those that came."""
    backend, pool = _opened["backend"], _opened["pool"]
    pool.fill(12345)
    num_found = backend.batch_exists(keys)
    arrived = backend.batch_get_v1(keys, pool.slots(*range(len(keys))))
    return num_found, [_digest(pool, number) if has_come else None for number, has_come in enumerate(arrived)]


def clear() -> bool:
    """Remove this rank's pages."""
    cleared: bool = _opened["backend"].clear()
    return cleared


def close() -> None:
    """End the backend."""
    _opened["backend"].close()


def _digest(pool: SmallPool, number: int) -> str:
    return hashlib.sha256(pool.page(number)).hexdigest()
