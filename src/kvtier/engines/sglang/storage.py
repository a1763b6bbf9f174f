"""``KVTierStorage``: SGLang's storage backend for HiCache on a tier of kvtier's.

SGLang keeps host memory itself; behind it every rank's process has one of these, with one tier for each pool of host
memory. SGLang's own threads call it and wait. What cannot work is refused when the backend is attached; afterwards no
call raises: a page that cannot be stored or loaded is False.

Source: ``HiCacheStorage`` of SGLang 0.5.23.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolTransfer,
    PoolTransferResult,
)

from kvtier.engines.sglang.hits import HitPolicy, PoolNeed, find_hit
from kvtier.engines.sglang.identity import describe_part, make_model_identity, make_pool_config
from kvtier.engines.sglang.pages import HostPool, Pages, open_pages, open_values
from kvtier.engines.sglang.pool_store import PoolStore
from kvtier.engines.sglang.settings import parse_extra_config
from kvtier.engines.sglang.traffic import TrafficLog
from kvtier.errors import ConfigError, KVTierError, TierError, describe_foreign
from kvtier.histogram import HistogramSnapshot
from kvtier.observe.prometheus import MetricsServer, serve_metrics
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.kit.threaded_tier import ThreadedTier

logger = logging.getLogger(__name__)

KV_POOL = "kv"
"""SGLang's name of the pool of keys and values."""

VALUES = "kv values"
"""Name of the rows through which pages come as tensors, in messages and metrics."""


class KVTierStorage(HiCacheStorage):
    """Keeps the pages of SGLang's HiCache in a tier; ``--hicache-storage-backend dynamic`` names this class.

    Mutable are the pools; SGLang registers them before its threads begin, and later ones on its scheduler's thread. A
    lock guards the opening of rows for tensors. Any thread may make the other calls.

    Args:
        storage_config: what SGLang says of model and ranks, with the user's JSON.
        kwargs: what else a release hands over; nothing is read.
        clock: seconds, monotonic.

    Raises:
        KVTierError: a setting cannot work, or the model has no identity; the message has the remedy.
    """

    def __init__(
        self,
        storage_config: HiCacheStorageConfig,
        kwargs: Mapping[str, object] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        **others: object,
    ) -> None:
        del kwargs, others
        extra_config = storage_config.extra_config or {}
        self._settings = parse_extra_config(extra_config)
        self._storage_config = storage_config
        self._has_interface_v1 = bool(extra_config.get("interface_v1", 0))
        self._clock = clock
        self._model = make_model_identity(self._settings, storage_config)
        self._traffic = TrafficLog(clock, is_on=bool(storage_config.enable_storage_metrics))
        self._lock = threading.Lock()
        self._stores: dict[str, PoolStore] = {}
        self._pools: dict[str, HostPool] = {}
        self._refused: dict[str, KVTierError] = {}
        self._reported: set[str] = set()
        self._replicas: set[str] = set()
        self._kv_pages: Pages | None = None
        self._is_closed = False
        self._metrics = self._serve_metrics()

    def register_mem_pool_host(self, mem_pool_host: HostPool, **others: object) -> None:
        """Take the pool of keys and values. Raises what makes it impossible to store its pages, as KVTierErrors."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV_POOL, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: str, **others: object) -> None:
        """Take one more pool; if its pages cannot be stored, they are misses and the attachment is refused."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _name_of(host_pool_name)
        try:
            self._register(name, host_pool)
        except KVTierError as error:
            logger.error("pool %s: its pages are not stored: %s", name, error)  # noqa: TRY400 - no bug of ours
            self._refused[name] = error

    def on_host_pools_registered(self, **others: object) -> None:
        """Refuse the attachment if the pages of a pool cannot be stored."""
        if self._refused:
            raise next(iter(self._refused.values()))

    def exists(self, key: str, **others: object) -> bool:
        """Return whether the page of keys and values is held."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: object = None, **others: object) -> int:
        """Return how many of the leading pages of keys and values are held."""
        held = self._find_held(KV_POOL, keys)
        return held.index(False) if False in held else len(held)

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: object = None,
        **others: object,
    ) -> PoolTransferResult:
        """Return how long a prefix every pool can serve."""
        try:
            return self._find_prefix(keys, pool_transfers or ())
        except Exception as error:  # noqa: BLE001 # foreign: a transfer of another form must not end SGLang's thread
            logger.warning("a lookup in several pools has failed: %s", describe_foreign(error))
            return PoolTransferResult(0, {}, [])

    def _find_prefix(self, keys: Sequence[str], transfers: Sequence[PoolTransfer]) -> PoolTransferResult:
        needs = [need for transfer in transfers if (need := self._need_of(transfer)) is not None]
        # An anchor without memory holds nothing: its pages are where the other pools' are.
        num_kv_pages = len(keys) if needs and self._is_logical() else self.batch_exists(keys)
        hit = find_hit(KV_POOL, num_kv_pages, keys, needs, self._find_held)
        return PoolTransferResult(hit.num_pages, hit.by_pool, hit.ends)

    def batch_get_v1(
        self, keys: Sequence[str], host_indices: object, extra_info: object = None, **others: object
    ) -> list[bool]:
        """Read pages of keys and values into the host pool; return for each whether its bytes are there."""
        return self._move(KV_POOL, keys, host_indices, is_store=False)

    def batch_set_v1(
        self, keys: Sequence[str], host_indices: object, extra_info: object = None, **others: object
    ) -> list[bool]:
        """Write pages of keys and values; return for each whether it is held now."""
        return self._move(KV_POOL, keys, host_indices, is_store=True)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None, **others: object
    ) -> dict[str, list[bool]]:
        """Read pages into each transfer's pool; return for each page whether its bytes are there."""
        return {one.name: self._move_transfer(one, is_store=False) for one in transfers}

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None, **others: object
    ) -> dict[str, list[bool]]:
        """Write pages of each transfer's pool; return for each page whether it is held now."""
        return {one.name: self._move_transfer(one, is_store=True) for one in transfers}

    def get(
        self, key: str, target_location: object = None, target_sizes: object = None, **others: object
    ) -> object:
        """Read a page of keys and values into a tensor and return that; None when it is not held."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Sequence[object] | None = None,
        target_sizes: object = None,
        **others: object,
    ) -> list[object]:
        """Read pages of keys and values into tensors; return for each the tensor, None for one that is not held."""
        targets = list(target_locations or [None] * len(keys))[: len(keys)]
        targets += [None] * (len(keys) - len(targets))
        store = self._values()
        if store is None:
            return [None] * len(keys)
        with self._traffic.measure(is_store=False) as moved:
            has_worked = store.load_values(keys, targets)
            moved.add(sum(has_worked), store.page_bytes)
        return [target if is_there else None for target, is_there in zip(targets, has_worked, strict=True)]

    def set(
        self,
        key: str,
        value: object = None,
        target_location: object = None,
        target_sizes: object = None,
        **others: object,
    ) -> bool:
        """Write a tensor with the bytes of a page of keys and values; return whether it is held now."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Sequence[object] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
        **others: object,
    ) -> bool:
        """Write tensors with the bytes of a page each; return whether all are held now."""
        store = self._values()
        if store is None or values is None or len(values) != len(keys):
            return False
        if KV_POOL in self._replicas:
            return True
        with self._traffic.measure(is_store=True) as moved:
            has_worked = store.store_values(keys, values)
            moved.add(sum(has_worked), store.page_bytes)
        return all(has_worked)

    def clear(self, **others: object) -> bool:
        """Remove what this rank has in the tier, of this model and layout; pages of others stay."""
        has_worked = [store.clear() for name, store in self._stores.items() if name != VALUES]
        return all(has_worked)

    def get_stats(self, **others: object) -> object:
        """Return what was moved since the last call as SGLang's StorageMetrics; None without --enable-metrics."""
        return self._traffic.take()

    def stats(self) -> dict[str, float]:
        """Return kvtier's own numbers under the names of its metrics; ``tier_index`` counts the pools. Thread: any."""
        found: dict[str, float] = {}
        for number, store in enumerate(list(self._stores.values())):
            start = f"tier.{number}.{store.tier_type}."
            found |= {f"{start}{name}": value for name, value in store.stats().items()}
        return found

    def histograms(self) -> dict[str, HistogramSnapshot]:
        """Return kvtier's own histograms, named likewise. Thread: any."""
        found: dict[str, HistogramSnapshot] = {}
        for number, store in enumerate(list(self._stores.values())):
            start = f"tier.{number}.{store.tier_type}."
            found |= {f"{start}{name}": value for name, value in store.histograms().items()}
        return found

    def close(self, **others: object) -> None:
        """End the tiers; later calls answer False. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._metrics is not None:
            self._metrics.close()
        for name, store in self._stores.items():
            if not store.close():
                _still_used.append(store)
                logger.error("pool %s: a transfer has not ended, and may still write into host memory", name)

    def _register(self, name: str, pool: HostPool) -> None:
        """Open the tier of a pool; an equal registration changes nothing."""
        if self._pools.get(name) is pool or self._is_closed:
            return
        if name in self._stores:
            self._stores.pop(name).close()
        self._pools[name] = pool
        if _has_no_memory(pool):
            return
        settings, storage_config = self._settings, self._storage_config
        has_values = name == KV_POOL and not self._has_interface_v1
        pages = open_pages(pool, settings.staging_bytes, has_values=has_values)
        part = describe_part(storage_config, pool, name)
        if part.is_replicated and not storage_config.is_storage_writer:
            self._replicas.add(name)
        self._stores[name] = self._open_store(name, pool, pages)
        if name == KV_POOL:
            self._kv_pages = pages

    def _open_store(self, name: str, pool: HostPool, pages: Pages, *, is_values: bool = False) -> PoolStore:
        part = describe_part(self._storage_config, pool, name)
        config = make_pool_config(self._settings, self._model, pool, pages, name, part)
        tier = create_secondary_tier(self._settings.tier, pages.rows, config)
        assert isinstance(tier, ThreadedTier), "the settings are checked"
        try:
            tier.check_reachable()
        except TierError as error:
            if tier.settings.required:
                tier.shutdown(0.0)
                raise
            logger.warning("pool %s: %s; its pages are misses until then", name, error)
        logger.info(
            "pool %s: %s of %d bytes in tier %s", name, pages.form, pages.page_bytes, tier.get_tier_type()
        )
        return PoolStore(VALUES if is_values else name, None if is_values else pool, pages, tier, self._clock)

    def _rank(self) -> int:
        """Return the number of this process among those of the engine."""
        config = self._storage_config
        number: int = (
            config.dp_rank * config.pp_size + config.pp_rank
        ) * config.attn_cp_size + config.attn_cp_rank
        return number * int(config.tp_size) + int(config.tp_rank)

    def _values(self) -> PoolStore | None:
        """Return what moves tensors, None where it cannot be."""
        store, pages = self._stores.get(KV_POOL), self._kv_pages
        if store is None or pages is None or self._is_closed:
            return None
        if not self._has_interface_v1:
            return store
        with self._lock:
            if VALUES not in self._stores and VALUES not in self._reported:
                self._open_values(pages)
            return self._stores.get(VALUES)

    def _open_values(self, pages: Pages) -> None:
        values = open_values(pages, self._settings.staging_bytes)
        try:
            if values is None:
                raise ConfigError(
                    "interface_v1", 1, "with this layout no page comes as a tensor: leave it out"
                )
            self._stores[VALUES] = self._open_store(KV_POOL, self._pools[KV_POOL], values, is_values=True)
        except KVTierError as error:
            self._log_once(VALUES, f"get and set of tensors: {error}")

    def _find_held(self, name: str, keys: Sequence[str]) -> list[bool]:
        store = self._stores.get(name)
        if store is None:
            self._log_once(name, f"pool {name} is not registered: its pages are misses")
            return [False] * len(keys)
        try:
            return store.find_held(keys)
        except Exception as error:  # noqa: BLE001 # foreign: whatever it is, it must not end SGLang's thread
            logger.warning("pool %s: a lookup has failed: %s", name, describe_foreign(error))
            return [False] * len(keys)

    def _move(self, name: str, keys: Sequence[str], indices: object, *, is_store: bool) -> list[bool]:
        store = self._stores.get(name)
        if store is None:
            if name in self._pools and _has_no_memory(self._pools[name]):
                return [True] * len(keys)  # there is nothing to move
            self._log_once(name, f"pool {name} is not registered: its pages are neither stored nor loaded")
            return [False] * len(keys)
        if is_store and name in self._replicas:
            return [True] * len(keys)  # the writer of this model stores the only copy
        with self._traffic.measure(is_store=is_store) as moved:
            has_worked = (store.store if is_store else store.load)(keys, indices)
            moved.add(sum(has_worked), store.page_bytes)
        return has_worked

    def _move_transfer(self, transfer: PoolTransfer, *, is_store: bool) -> list[bool]:
        keys = transfer.keys or []
        return self._move(_name_of(transfer.name), keys, transfer.host_indices, is_store=is_store)

    def _need_of(self, transfer: PoolTransfer) -> PoolNeed | None:
        """Return what a transfer asks for; None where it concerns the pool of keys and values itself."""
        name = _name_of(transfer.name)
        policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
        known = {one.value: one for one in HitPolicy}
        if policy not in known:
            self._log_once(f"policy {policy}", f"hit policy {policy} is unknown: pool {name} needs all pages")
        return PoolNeed(
            name,
            known.get(policy, HitPolicy.ALL_PAGES),
            tuple(transfer.keys or ()),
            getattr(transfer, "block_pages", 0),
            getattr(transfer, "group_pages", 0),
        )

    def _is_logical(self) -> bool:
        return KV_POOL in self._pools and _has_no_memory(self._pools[KV_POOL])

    def _serve_metrics(self) -> MetricsServer | None:
        port = self._settings.metrics_port
        if port is None:
            return None
        return serve_metrics(self, port + self._rank() if port else 0, self._settings.metrics_host)

    def _log_once(self, cause: str, message: str) -> None:
        if cause not in self._reported:
            self._reported.add(cause)
            logger.warning("%s", message)


_still_used: list[PoolStore] = []
"""Pools whose memory a thread may still write to: they are kept for as long as the process lives."""


def _name_of(pool_name: object) -> str:
    return str(getattr(pool_name, "value", pool_name))


def _has_no_memory(pool: object) -> bool:
    """Return whether a pool only numbers pages, whose bytes are all in other pools."""
    return getattr(pool, "kv_buffer", pool) is None and getattr(pool, "size_per_token", None) == 0
