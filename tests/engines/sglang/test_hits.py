"""How long a prefix may be loaded: the policies of pools, alone and beside SGLang's own backend."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer

from kvtier.engines.sglang.hits import HitPolicy, PoolNeed, PrefixHit, find_hit

KEYS = [f"{number:064x}" for number in range(8)]


def hit_of(num_kv: int, *needs: tuple[PoolNeed, str]) -> PrefixHit:
    """Return what can be loaded; each pool's pages are given as text, one letter a page: x is held."""
    pages = {need.name: text for need, text in needs}

    def find(name: str, keys: Sequence[str]) -> list[bool]:
        return [pages[name][KEYS.index(key)] == "x" for key in keys]

    return find_hit("kv", num_kv, KEYS, [need for need, _ in needs], find)


def trailing(num_pages: int) -> PoolNeed:
    """Return what a window of so many pages needs."""
    return PoolNeed("swa", HitPolicy.TRAILING_PAGES, tuple(KEYS[-num_pages:]))


ALL = PoolNeed("indexer", HitPolicy.ALL_PAGES)


@pytest.mark.parametrize(
    ("hit", "num_pages", "by_pool", "ends"),
    [
        (hit_of(0), 0, {}, []),
        (hit_of(3), 3, {"kv": 3}, [1, 2, 3]),
        (hit_of(5, (ALL, "xxx.x...")), 3, {"kv": 5, "indexer": 3}, [1, 2, 3]),
        (hit_of(5, (ALL, ".xxxxxxx")), 0, {"kv": 5}, []),
        (hit_of(5, (trailing(1), ".x.x....")), 4, {"kv": 5, "swa": 4}, [2, 4]),
        (hit_of(5, (trailing(2), "xx.xx...")), 5, {"kv": 5, "swa": 5}, [1, 2, 5]),
        (hit_of(5, (trailing(2), "x.x.x...")), 1, {"kv": 5, "swa": 1}, [1]),
        (hit_of(6, (ALL, "xxxx...."), (trailing(1), ".x..xx..")), 2, {"kv": 6, "indexer": 4, "swa": 6}, [2]),
    ],
)
def test_a_prefix_ends_where_every_pool_can_serve_it(
    hit: PrefixHit, num_pages: int, by_pool: dict[str, int], ends: list[int]
) -> None:
    assert hit == PrefixHit(num_pages, by_pool, ends)


@pytest.mark.parametrize(
    ("keys", "held", "expected"),
    [
        (KEYS[:4], "xxxx....", 6),  # both groups of two blocks of three
        (KEYS[:4], "xxx.....", 3),
        (KEYS[:4], ".xxxxxxx", 0),
        ([], ".xx.xx..", 6),  # the last two pages of each block
        ([], ".xx..x..", 3),
    ],
)
def test_block_groups_have_a_verdict_of_their_own_and_shorten_nothing(
    keys: list[str], held: str, expected: int
) -> None:
    need = PoolNeed("c4", HitPolicy.BLOCK_GROUPS, tuple(keys), block_pages=3, group_pages=2)
    hit = hit_of(8, (need, held))
    assert (hit.num_pages, hit.by_pool.get("c4", 0)) == (8, expected)


@pytest.mark.parametrize(("block_pages", "group_pages"), [(0, 1), (1, 0), (-1, 2), (9, 1)])
def test_block_groups_without_a_whole_block_cover_nothing(block_pages: int, group_pages: int) -> None:
    need = PoolNeed("c4", HitPolicy.BLOCK_GROUPS, (), block_pages, group_pages)
    assert hit_of(8, (need, "xxxxxxxx")).by_pool == {"kv": 8}


class HeldPages:
    """SGLang's backend of files as far as it decides; what is held is given."""

    def __init__(self, held: dict[str, list[bool]]) -> None:
        self._held = held

    def _get_component_key(self, key: str, name: Any = "kv") -> str:
        return f"{getattr(name, 'value', name)}:{key}"

    def _collect_existing_component_keys(self, keys: list[str], transfers: object) -> set[str]:
        return {
            f"{name}:{key}.bin"
            for name, pages in self._held.items()
            for key, is_held in zip(keys, pages, strict=True)
            if is_held
        }


def test_any_pools_have_the_hits_of_sglangs_own_backend() -> None:
    for seed in range(1000):
        compare_hits(random.Random(seed))


def compare_hits(chance: random.Random) -> None:
    """Compare the hits of some pools, of which some pages are held."""
    names = chance.sample(
        [PoolName.MAMBA, PoolName.SWA, PoolName.INDEXER, PoolName.DRAFT], chance.randint(0, 3)
    )
    ratio = chance.choice([0.5, 0.9, 1.0])
    held = {name.value: [chance.random() < ratio for _ in KEYS] for name in [PoolName.KV, *names]}
    transfers = [
        PoolTransfer(
            name,
            keys=KEYS[: chance.randint(0, 4)] or None,
            hit_policy=chance.choice([PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES]),
        )
        for name in names
    ]
    expected = HiCacheFile.batch_exists_v2(HeldPages(held), KEYS, transfers)

    def find(name: str, keys: Sequence[str]) -> list[bool]:
        return [held[name][KEYS.index(key)] for key in keys]

    needs = [
        PoolNeed(one.name.value, HitPolicy(one.hit_policy.value), tuple(one.keys or ())) for one in transfers
    ]
    kv_pages = (held["kv"] + [False]).index(False)
    hit = find_hit("kv", kv_pages, KEYS, needs, find)
    assert (hit.num_pages, hit.by_pool) == (expected.kv_hit_pages, expected.extra_pool_hit_pages)
    assert hit.ends == (expected.restorable_prefix_pages or [])
