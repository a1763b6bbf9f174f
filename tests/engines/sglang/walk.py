"""A random walk of one backend beside SGLang's own of files: every answer and every byte must be the same.

    python -m tests.engines.sglang.walk --pages 100000

Sets, gets, lookups and clears come in the proportions of an engine that is refilled often. Each page that is written
has bytes of its own, so that a page under another's key is seen.
"""

import argparse
import logging
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.engines.sglang.pools import SmallPool

MAX_BATCH_PAGES = 16
NUM_KEYS = 1024


@dataclass
class WalkCounts:
    """What a walk did.

    Attributes:
        num_pages: pages that were set, got or looked up.
        num_hits: pages that a get has found.
        num_clears: clears.
    """

    num_pages: int = 0
    num_hits: int = 0
    num_clears: int = 0


class Walk:
    """One walk over a backend and an oracle, each with a pool of its own.

    Args:
        backend: what is under test.
        oracle: SGLang's backend of files.
        pools: the pool of each; equal in everything.
        seed: of the walk.
        has_slots: whether the backend is called with slots (``batch_set_v1``); otherwise with tensors.
        num_keys: keys that there are; with fewer more are found.
    """

    def __init__(
        self,
        backend: Any,
        oracle: Any,
        pools: tuple[SmallPool, SmallPool],
        seed: int,
        *,
        has_slots: bool,
        num_keys: int = NUM_KEYS,
    ) -> None:
        self._num_keys = num_keys
        self._backend, self._oracle = backend, oracle
        self._pool, self._oracle_pool = pools
        self._chance = random.Random(seed)
        self._has_slots = has_slots
        self._num_pool_pages = self._pool.size // self._pool.page_size
        self.counts = WalkCounts()

    def run(self, num_pages: int) -> WalkCounts:
        """Walk until so many pages were set, got or looked up, and return what happened."""
        while self.counts.num_pages < num_pages:
            step = self._chance.choices(
                (self._set, self._get, self._exists, self._clear), (40, 40, 20, 0.02)
            )[0]
            step()
        return self.counts

    def _keys(self) -> list[str]:
        """Return keys that follow each other, as those of a prefix do."""
        begin = self._chance.randrange(self._num_keys)
        num = self._chance.randint(1, MAX_BATCH_PAGES)
        self.counts.num_pages += num
        return [f"{number % self._num_keys:064x}" for number in range(begin, begin + num)]

    def _set(self) -> None:
        keys = self._keys()
        places = self._chance.sample(range(self._num_pool_pages), len(keys))
        for place in places:
            page = torch.frombuffer(
                bytearray(self._chance.randbytes(self._page(self._pool, place).nbytes)), dtype=torch.uint8
            )
            for pool in (self._pool, self._oracle_pool):
                pool.set_from_flat_data_page(place * pool.page_size, page.view(pool.dtype))
        pages = [self._page(self._oracle_pool, place) for place in places]
        expected = [self._oracle.set(key, page) for key, page in zip(keys, pages, strict=True)]
        if self._has_slots:
            answers = self._backend.batch_set_v1(keys, self._pool.slots(*places))
        else:
            answers = [self._backend.set(key, page) for key, page in zip(keys, pages, strict=True)]
        assert answers == expected, (keys, answers, expected)

    def _get(self) -> None:
        keys = self._keys()
        places = self._chance.sample(range(self._num_pool_pages), len(keys))
        empty = self._oracle_pool.get_dummy_flat_data_page
        expected = [self._oracle.get(key, empty()) for key in keys]
        if self._has_slots:
            has_worked = self._backend.batch_get_v1(keys, self._pool.slots(*places))
            got = [
                self._page(self._pool, place) if is_there else None
                for place, is_there in zip(places, has_worked, strict=True)
            ]
        else:
            got = self._backend.batch_get(keys, [empty() for _ in keys])
        for key, page, other in zip(keys, got, expected, strict=True):
            assert (page is None) == (other is None), key
            if page is not None and other is not None:
                self.counts.num_hits += 1
                assert torch.equal(page.view(torch.uint8), other.view(torch.uint8)), key

    def _exists(self) -> None:
        keys = self._keys()
        assert self._backend.batch_exists(keys) == self._oracle.batch_exists(keys), keys
        assert self._backend.exists(keys[-1]) == self._oracle.exists(keys[-1]), keys[-1]

    def _clear(self) -> None:
        self.counts.num_clears += 1
        assert self._backend.clear()
        assert self._oracle.clear()

    @staticmethod
    def _page(pool: SmallPool, place: int) -> torch.Tensor:
        page: torch.Tensor = pool.get_data_page(place * pool.page_size, flat=True)
        return page


def open_pair(
    folder: Path, tier: dict[str, Any], *, layout: str, has_slots: bool
) -> tuple[Any, Any, tuple[SmallPool, SmallPool]]:
    """Return a backend on a tier, SGLang's backend of files in a folder, and the pool of each."""
    import types

    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from tests.engines.sglang.pools import HeadsPool

    from kvtier.engines.sglang import KVTierStorage

    # SGLang's evictor imports one function beside CUDA kernels, for its log.
    common = types.ModuleType("sglang.srt.utils.common")
    common.human_readable_int = int  # type: ignore[attr-defined]
    sys.modules.setdefault("sglang.srt.utils", types.ModuleType("sglang.srt.utils"))
    sys.modules.setdefault("sglang.srt.utils.common", common)
    logging.getLogger("sglang").setLevel(logging.ERROR)  # a line for each page that is not held
    extra = {"interface_v1": int(has_slots), "tier": tier, "model_revision": "walk"}
    described = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "walk", extra_config=extra)
    pools = HeadsPool(layout, 64, 2, dim=4), HeadsPool(layout, 64, 2, dim=4)
    backend = KVTierStorage(described, {})
    backend.register_mem_pool_host(pools[0])
    plain = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "walk")
    oracle = HiCacheFile(plain, str(folder / "oracle"))
    return backend, oracle, pools


def main() -> None:
    """Walk, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--layout", default="page_first", choices=("page_first", "page_first_direct", "layer_first")
    )
    parser.add_argument("--values", action="store_true", help="call with tensors, as without interface_v1")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tier = {"type": "fs", "root_dir": str(folder / "kv"), "capacity_bytes": "256MiB"}
        backend, oracle, pools = open_pair(folder, tier, layout=given.layout, has_slots=not given.values)
        counts = Walk(backend, oracle, pools, given.seed, has_slots=not given.values).run(given.pages)
        backend.close()
    print(
        f"{counts.num_pages} pages, {counts.num_hits} of them found, {counts.num_clears} clears: all answers equal"
    )


if __name__ == "__main__":
    main()
