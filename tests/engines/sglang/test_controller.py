"""SGLang's own controller over the backend: the functions with which it backs pages up and prefetches them.

Its module imports an engine, so the functions are compiled from the wheel's source, without threads and collectives.
"""

import hashlib
import logging
import queue
import sys
import threading
import types
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    count_pool_hits,
)
from tests.engines.sglang.conftest import MakeConfig, MakeStorage
from tests.engines.sglang.pools import HeadsPool, LatentPool, compile_from

FUNCTIONS = (
    "_page_backup", "_page_set_zero_copy", "_generic_page_set", "_storage_hit_query",
    "_page_transfer", "_page_transfer_kv_batch", "_page_get_zero_copy", "_generic_page_get",
    "attach_storage_backend", "detach_storage_backend",
)  # fmt: skip
NUM_PAGES = 200
"""More than SGLang hands over at once."""


def hash_pages(tokens: list[int], prior: str | None, page_size: int) -> list[str]:
    """Return a chain of page hashes, as SGLang's compiled function does."""
    hashes, digest = [], (prior or "").encode()
    for begin in range(0, len(tokens), page_size):
        digest = hashlib.sha256(digest + str(tokens[begin : begin + page_size]).encode()).hexdigest().encode()
        hashes.append(digest.decode())
    return hashes


class Controller:
    """SGLang's ``HiCacheController`` as far as it calls a backend.

    Args:
        backend: the backend.
        pool: the host pool.
        has_slots: whether it was told of ``interface_v1``.
    """

    def __init__(self, backend: Any, pool: Any, *, has_slots: bool) -> None:
        self.storage_backend, self.storage_host_pool, self.page_size = backend, pool, pool.page_size
        self.prefetch_sync_queue: queue.Queue[Any] = queue.Queue()
        self.mem_pool_host = SimpleNamespace(size=pool.size, logical_size=pool.size, entries=[])
        self.enable_storage, self.storage_stop_event = False, threading.Event()
        self.prefetch_hits_sync_groups: list[object] = []
        self.prefetch_completion_sync_groups: list[object] = []
        self.host_memory_mode, self._registers_host_pools_after_super_attach = "normal", False
        space = {
            "STORAGE_BATCH_SIZE": STORAGE_BATCH_SIZE,
            "HiCacheStorageExtraInfo": HiCacheStorageExtraInfo,
            "PoolName": PoolName,
            "PoolTransfer": PoolTransfer,
            "count_pool_hits": count_pool_hits,
            "get_storage_hash_str": hash_pages,
            "PrefetchAck": SimpleNamespace,
            "logger": logging.getLogger("sglang"),
            "get_parallel": lambda: SimpleNamespace(attn_dcp_size=1),
        }
        for name, function in compile_from(
            "sglang.srt.managers.cache_controller", "HiCacheController", FUNCTIONS
        ).items():
            function.__globals__.update(space)
            setattr(self, name, function.__get__(self))
        self.page_get_func = self._page_get_zero_copy if has_slots else self._generic_page_get
        self.page_set_func = self._page_set_zero_copy if has_slots else self._generic_page_set

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _start_storage_threads(self) -> None:
        """Start none: the tests call what the threads would."""

    _stop_storage_threads = _start_storage_threads

    def _create_sync_groups(self) -> list[object]:
        return []

    def _destroy_sync_groups(self, groups: list[object]) -> None:
        """End none."""


def operation_of(tokens: list[int], slots: Any, **others: Any) -> Any:
    """Return an operation of SGLang's on some tokens."""
    values: dict[str, Any] = {
        "token_ids": tokens, "host_indices": slots, "last_hash": None, "prefix_keys": None, "completed_tokens": 0,
        "request_id": "r", "pool_transfers": None, "is_terminated": lambda: False,
    }  # fmt: skip
    return SimpleNamespace(**(values | others))


@pytest.mark.parametrize("has_slots", [True, False], ids=["interface v1", "tensors"])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(HeadsPool, "page_first"), (HeadsPool, "layer_first"), (LatentPool, "page_first_direct")],
)
def test_a_prefix_is_backed_up_found_and_prefetched(
    kind: Any, layout: str, has_slots: bool, make_storage: MakeStorage
) -> None:
    pool = kind(layout, 2 * NUM_PAGES)
    pool.fill(1)
    storage = make_storage(pool, extra_config={"interface_v1": int(has_slots)})
    controller = Controller(storage, pool, has_slots=has_slots)
    tokens = list(range(NUM_PAGES * pool.page_size))
    hashes = hash_pages(tokens, None, pool.page_size)
    backup = operation_of(tokens, pool.slots(*range(NUM_PAGES)), hash_value=hashes)
    controller._page_backup(backup)
    assert backup.completed_tokens == len(tokens)

    longer = [*tokens, *range(64)]
    pages = [pool.page(number) for number in range(NUM_PAGES)]
    pool.fill(2)
    prefetch = operation_of(longer, pool.slots(*range(NUM_PAGES, 2 * NUM_PAGES)))
    prefetch.hash_value, num_tokens = controller._storage_hit_query(prefetch)
    assert (prefetch.hash_value, num_tokens) == (hashes, len(tokens))
    assert controller._page_transfer(prefetch) == NUM_PAGES
    assert [pool.page(number) for number in range(NUM_PAGES, 2 * NUM_PAGES)] == pages


def test_pools_that_share_the_slots_are_prefetched_with_keys_and_values(make_storage: MakeStorage) -> None:
    pool, indexer = LatentPool(num_pages=64), LatentPool(num_pages=64, dim=4)
    pool.fill(1)
    indexer.fill(2)
    storage = make_storage(pool)
    storage.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    controller = Controller(storage, pool, has_slots=True)
    tokens = list(range(8 * pool.page_size))
    hashes = hash_pages(tokens, None, pool.page_size)
    slots = pool.slots(*range(8))
    controller._page_backup(operation_of(tokens, slots, hash_value=hashes))
    # One page of the indexer is missing: the prefix ends before it.
    sidecar = PoolTransfer(PoolName.INDEXER, slots[: 5 * pool.page_size], keys=hashes[:5])
    assert storage.batch_set_v2([sidecar]) == {PoolName.INDEXER: [True] * 5}
    page = indexer.page(4)
    need = PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV)
    prefetch = operation_of(tokens, pool.slots(*range(20, 28)), hash_value=hashes, pool_transfers=[need])
    assert controller._page_transfer(prefetch) == 5
    assert indexer.page(24) == page


@pytest.fixture
def attachable(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> Controller:
    """Return a controller without a backend, whose description of one is the test's."""
    utils = types.ModuleType("sglang.srt.mem_cache.utils")
    utils.get_hash_str = hash_pages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.mem_cache.utils", utils)
    pool = HeadsPool(num_pages=64)
    pool.fill(1)
    controller = Controller(None, pool, has_slots=False)
    vars(controller)["_generate_storage_config"] = lambda name, extra: make_config(extra_config=extra)
    return controller


def test_a_backend_is_attached_and_detached_while_the_engine_is_idle(attachable: Controller) -> None:
    pool = attachable.storage_host_pool
    tokens = list(range(4 * pool.page_size))
    hashes = hash_pages(tokens, None, pool.page_size)
    for number in range(3):
        attachable.attach_storage_backend("dynamic", 1, "model", {"interface_v1": 1})
        assert attachable.page_get_func == attachable._page_get_zero_copy
        found = attachable._storage_hit_query(operation_of(tokens, None))
        assert found == (hashes[: 4 if number else 0], len(tokens) if number else 0)
        attachable._page_backup(operation_of(tokens, pool.slots(0, 1, 2, 3), hash_value=hashes))
        backend = attachable.storage_backend
        attachable.detach_storage_backend()
        assert attachable.storage_backend is None
        assert backend.batch_set_v1(hashes[:1], pool.slots(0)) == [False]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvtier-fs")]


@pytest.mark.parametrize(
    "extra",
    [{"tier": {"type": "fz"}}, {"tier": {"type": "fs", "root_dir": "/proc/x", "capacity_bytes": "1GiB"}}],
    ids=["at the construction", "at the registration"],
)
def test_an_attachment_that_fails_leaves_the_engine_as_it_was(
    extra: dict[str, Any], attachable: Controller
) -> None:
    with pytest.raises(ValueError, match=r"fz|root_dir"):
        attachable.attach_storage_backend("dynamic", 1, "model", extra)
    assert (attachable.storage_backend, attachable.enable_storage) == (None, False)
    attachable.attach_storage_backend("dynamic", 1, "model", {"interface_v1": 1})
    attachable.detach_storage_backend()
