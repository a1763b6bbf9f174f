"""Faults cost pages and nothing else: SGLang's own injector, a tier that is away, threads that call at once."""

import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector, PoolTransfer
from tests.engines.sglang.conftest import MakeStorage, flat_page, key_of
from tests.engines.sglang.pools import HeadsPool

from kvtier.errors import TierError
from kvtier.testing.clock import ManualClock
from kvtier.testing.tier_driver import HANG_GUARD_S
from kvtier.tiering.base import FAILURES_TO_OPEN

KEYS = [key_of(number) for number in range(64)]


def test_faults_of_sglangs_injector_lose_nothing(make_storage: MakeStorage) -> None:
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3):
        injected: Any = make_storage()
    assert isinstance(injected, HiCacheStorageFailureInjector)
    pool = HeadsPool()
    injected.register_mem_pool_host(pool)
    injected.on_host_pools_registered()
    chance = random.Random(1)
    stored: dict[str, bytes] = {}
    for number in range(300):
        place = chance.randrange(16)
        pool.fill(number)
        page, keys = pool.page(place), [chance.choice(KEYS)]
        if injected.batch_set_v1(keys, pool.slots(place)) == [True]:
            stored.setdefault(keys[0], page)  # a page that is held is not written again
    backend = injected._backend
    for key, page in stored.items():
        pool.fill(1000)
        assert backend.batch_get_v1([key], pool.slots(3)) == [True]
        assert pool.page(3) == page
    for _ in range(100):
        pool.fill(1000)
        key = chance.choice(sorted(stored))
        (has_worked,) = injected.batch_get_v1([key], pool.slots(3))
        assert not has_worked or pool.page(3) == stored[key]
        assert injected.batch_exists([key]) in (0, 1)
        assert injected.batch_exists_v2([key], [PoolTransfer("mamba")]).kv_hit_pages == 0
        assert injected.get(key, flat_page(pool, 0)) is None or True
    assert injected.clear()
    assert injected.batch_exists(sorted(stored)) == 0


def test_a_directory_that_is_removed_is_misses_and_is_written_again(
    make_storage: MakeStorage, tmp_path: Path
) -> None:
    pool = HeadsPool()
    storage = make_storage(pool)
    assert storage.batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    shutil.rmtree(tmp_path / "kv")
    end_s = time.monotonic() + HANG_GUARD_S
    while storage.batch_exists(KEYS[:2]):  # seen within a second; until then the open files have the pages
        assert time.monotonic() < end_s, "pages of a directory that is gone are said to be there"
    assert storage.batch_get_v1(KEYS[:2], pool.slots(0, 1)) == [False, False]
    assert storage.batch_set_v1(KEYS[2:4], pool.slots(0, 1)) in ([True, True], [False, False])


def test_a_tier_that_fails_again_and_again_is_left_alone_for_a_while(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HeadsPool()
    storage = make_storage(pool)
    store = storage._stores["kv"]
    clock = ManualClock()
    store._breaker._clock = clock
    num_calls, is_away = 0, True

    def load(*given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if is_away:
            raise TierError("fs", "is away")
        return store_load(*given)

    store_load = store._tier._block_store.load
    monkeypatch.setattr(store._tier._block_store, "load", load)
    assert storage.batch_set_v1(KEYS[:1], pool.slots(0)) == [True]
    for _ in range(2 * FAILURES_TO_OPEN):
        assert storage.batch_get_v1(KEYS[:1], pool.slots(1)) == [False]
    num_before = num_calls
    assert storage.batch_set_v1(KEYS[:1], pool.slots(0)) == [False]
    assert storage.batch_exists(KEYS[:1]) == 0
    assert num_calls == num_before
    clock.advance(60.0)
    is_away = False
    assert storage.batch_get_v1(KEYS[:1], pool.slots(1)) == [True]
    assert storage.batch_exists(KEYS[:1]) == 1


def test_a_pool_that_raises_costs_its_pages(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = HeadsPool("layer_first")
    storage = make_storage(pool)
    assert storage.batch_set_v1(KEYS[:1], pool.slots(0)) == [True]

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(pool, "get_page_buffer_meta", fail, raising=False)
    assert storage.batch_set_v1(KEYS[1:2], pool.slots(0)) == [False]
    assert storage.batch_get_v1(KEYS[:1], pool.slots(0)) == [False]


def test_a_lookup_that_raises_finds_nothing(
    make_storage: MakeStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = make_storage(HeadsPool())

    def fail(_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(storage._stores["kv"]._tier.direct, "find_held", fail)
    assert storage.batch_exists(KEYS) == 0


def test_threads_that_store_load_and_clear_at_once_get_only_right_bytes(make_storage: MakeStorage) -> None:
    pool = HeadsPool("layer_first", num_pages=64)
    pool.fill(1)
    storage = make_storage(pool, extra_config={"staging_bytes": 4096})
    pages = {key: pool.page(number) for number, key in enumerate(KEYS[:32])}
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(40):
                chosen = chance.sample(range(32), 6)
                keys = [KEYS[number] for number in chosen]
                if seed == 0 and chance.random() < 0.2:
                    storage.clear()
                elif seed % 2:
                    storage.batch_set_v1(keys, pool.slots(*chosen))
                else:
                    places = [32 + 8 * (seed // 2) + number for number in range(6)]
                    arrived = storage.batch_get_v1(keys, pool.slots(*places))
                    for key, place, has_come in zip(keys, places, arrived, strict=True):
                        assert not has_come or pool.page(place) == pages[key]
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def test_a_backend_that_is_closed_under_calls_ends_them(make_storage: MakeStorage) -> None:
    pool = HeadsPool("layer_first")
    storage = make_storage(pool)
    has_begun, answers = threading.Event(), []

    def run() -> None:
        for number in range(200):
            answers.append(storage.batch_set_v1([key_of(number)], pool.slots(number % 16)))
            has_begun.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert has_begun.wait(60.0)
    storage.close()
    thread.join(60.0)
    assert not thread.is_alive()
    assert all(isinstance(one, bool) for answer in answers for one in answer)
    assert storage.batch_set_v1(KEYS[:1], pool.slots(0)) == [False]
    assert torch.equal(pool.kv_buffer, torch.zeros_like(pool.kv_buffer))
