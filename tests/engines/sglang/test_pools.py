"""Several pools behind one backend: each has its own pages, and SGLang's prefix needs all of them."""

from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from tests.engines.sglang.conftest import MakeStorage, key_of
from tests.engines.sglang.pools import AnchorPool, HeadsPool, LatentPool

from kvtier.engines.sglang import KVTierStorage
from kvtier.errors import KVTierError

KEYS = [key_of(number) for number in range(8)]


class StatePool:
    """A pool of recurrent states, a slot each, of two parts of different sizes: as ``MambaPoolHost`` lays them out."""

    def __init__(self, num_slots: int = 16) -> None:
        self.size, self.page_size, self.layout = num_slots, 1, "page_first"
        self.temporal_dtype, self.conv_dtype = torch.float32, torch.bfloat16
        self.temporal_buffer = torch.zeros(num_slots, 24, dtype=self.temporal_dtype)
        self.conv_buffer = torch.zeros(num_slots, 10, dtype=self.conv_dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return both parts of each slot."""
        parts = (self.temporal_buffer, self.conv_buffer)
        pieces = [(part[slot].data_ptr(), part[slot].nbytes) for slot in indices.tolist() for part in parts]
        return [address for address, _ in pieces], [size for _, size in pieces]

    def fill(self, value: float) -> None:
        """Fill the pool; each slot gets bytes of its own."""
        self.temporal_buffer[:] = torch.arange(16 * 24).reshape(16, 24) + value
        self.conv_buffer[:] = (torch.arange(16 * 10).reshape(16, 10) % 7) + value

    def slot(self, number: int) -> tuple[list[float], list[float]]:
        """Return the values of a slot."""
        return self.temporal_buffer[number].tolist(), self.conv_buffer[number].tolist()


class BrokenPool(HeadsPool):
    """A pool that offers no way to its pages."""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)


def open_hybrid(make_storage: MakeStorage) -> tuple[KVTierStorage, HeadsPool, StatePool]:
    """Return a backend with keys and values, and states."""
    pool = HeadsPool()
    states: Any = StatePool()
    pool.fill(1)
    states.fill(1.0)
    storage = make_storage(pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    storage.register_mem_host_pool_v2(states, PoolName.MAMBA)
    storage.on_host_pools_registered()
    return storage, pool, states


def state_need(keys: list[str], *slots: int) -> PoolTransfer:
    """Return a transfer of states at the ends of prefixes."""
    return PoolTransfer(
        PoolName.MAMBA, torch.tensor(slots), keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES
    )


def test_states_come_back_and_a_prefix_ends_where_one_is_held(make_storage: MakeStorage) -> None:
    storage, pool, states = open_hybrid(make_storage)
    assert storage.batch_set_v1(KEYS[:6], pool.slots(*range(6))) == [True] * 6
    stored = storage.batch_set_v2([state_need([KEYS[1], KEYS[3]], 4, 5)])
    assert stored == {PoolName.MAMBA: [True, True]}
    hit = storage.batch_exists_v2(KEYS, [state_need(KEYS[:1], 0)])
    assert (hit.kv_hit_pages, hit.restorable_prefix_pages) == (4, [2, 4])
    assert hit.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 4}
    expected = states.slot(5)
    states.fill(2.0)
    assert storage.batch_get_v2([state_need([KEYS[3], KEYS[4]], 9, 10)]) == {PoolName.MAMBA: [True, False]}
    assert states.slot(9) == expected


def test_pools_do_not_see_each_others_pages(make_storage: MakeStorage) -> None:
    storage, pool, _ = open_hybrid(make_storage)
    draft = HeadsPool()
    storage.register_mem_host_pool_v2(draft, PoolName.SWA)
    assert storage.batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    transfer = PoolTransfer(PoolName.SWA, draft.slots(0, 1), keys=KEYS[:2])
    assert storage.batch_get_v2([transfer]) == {PoolName.SWA: [False, False]}
    assert storage.batch_exists_v2(KEYS[:2], [transfer]).kv_hit_pages == 0


def test_the_pool_of_keys_and_values_is_the_same_by_either_interface(make_storage: MakeStorage) -> None:
    storage, pool, _ = open_hybrid(make_storage)
    transfer = PoolTransfer(PoolName.KV, pool.slots(0, 1), keys=KEYS[:2])
    assert storage.batch_set_v2([transfer]) == {PoolName.KV: [True, True]}
    assert storage.batch_exists(KEYS) == 2


def test_an_anchor_has_the_prefix_of_its_pools(make_storage: MakeStorage) -> None:
    storage = make_storage(AnchorPool())
    latents = LatentPool()
    storage.register_mem_host_pool_v2(latents, PoolName.DEEPSEEK_V4_C4)
    transfer = PoolTransfer(PoolName.DEEPSEEK_V4_C4, latents.slots(0, 1, 2), keys=KEYS[:3])
    assert storage.batch_set_v2([transfer]) == {PoolName.DEEPSEEK_V4_C4: [True] * 3}
    assert storage.batch_exists_v2(KEYS, [transfer]).kv_hit_pages == 3
    assert storage.batch_exists_v2(KEYS, []).kv_hit_pages == 0


def test_a_pool_without_a_way_to_its_pages_is_refused_at_the_attachment(make_storage: MakeStorage) -> None:
    storage = make_storage(HeadsPool())
    broken = BrokenPool()
    storage.register_mem_host_pool_v2(broken, PoolName.SWA)
    with pytest.raises(KVTierError, match="BrokenPool of layout page_first has no pages to store"):
        storage.on_host_pools_registered()
    transfer = PoolTransfer(PoolName.SWA, broken.slots(0), keys=KEYS[:1])
    assert storage.batch_set_v2([transfer]) == {PoolName.SWA: [False]}
    assert storage.batch_get_v2([transfer]) == {PoolName.SWA: [False]}


@pytest.mark.parametrize(
    "transfer",
    [
        pytest.param(PoolTransfer(PoolName.INDEXER, torch.arange(4), keys=KEYS[:1]), id="not registered"),
        pytest.param(PoolTransfer("no pool", torch.arange(4), keys=KEYS[:1]), id="unknown name"),
        pytest.param(PoolTransfer(PoolName.MAMBA, None, keys=KEYS[:1]), id="no slots"),
        pytest.param(PoolTransfer(PoolName.MAMBA, torch.tensor([99]), keys=KEYS[:1]), id="outside"),
        pytest.param(PoolTransfer(PoolName.MAMBA, torch.tensor([0, 1]), keys=KEYS[:1]), id="too many slots"),
    ],
)
def test_a_transfer_that_cannot_be_is_false_for_its_pages(
    transfer: PoolTransfer, make_storage: MakeStorage
) -> None:
    storage, _, _ = open_hybrid(make_storage)
    assert storage.batch_set_v2([transfer]) == {transfer.name: [False]}
    assert storage.batch_get_v2([transfer]) == {transfer.name: [False]}
    assert storage.batch_exists_v2(KEYS, [transfer]).kv_hit_pages == 0


def test_a_transfer_without_keys_moves_nothing(make_storage: MakeStorage) -> None:
    storage, _, _ = open_hybrid(make_storage)
    assert storage.batch_set_v2([PoolTransfer(PoolName.MAMBA)]) == {PoolName.MAMBA: []}
    assert storage.batch_get_v2([]) == {}


def test_an_unknown_hit_policy_needs_all_pages_and_raises_nothing(make_storage: MakeStorage) -> None:
    storage, pool, _ = open_hybrid(make_storage)
    assert storage.batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    transfer = PoolTransfer(PoolName.MAMBA, keys=KEYS[:1], hit_policy="of next year")
    assert storage.batch_exists_v2(KEYS, [transfer]).kv_hit_pages == 0


def test_arguments_of_a_later_release_are_taken(make_storage: MakeStorage) -> None:
    storage, pool, _ = open_hybrid(make_storage)
    assert storage.batch_set_v1(KEYS[:1], pool.slots(0), None, priority=1) == [True]
    assert storage.batch_exists(KEYS[:1], extra_info=None, priority=1) == 1
    assert storage.batch_exists_v2(KEYS[:1], None, None, session_id="s").kv_hit_pages == 1
    assert storage.batch_get_v2([], session_id="s") == {}
