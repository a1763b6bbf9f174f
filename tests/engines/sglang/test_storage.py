"""SGLang's interface on kvtier's tiers: pages come back as they were, and what cannot be is False."""

import types
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.mem_cache.hicache_storage", reason="needs SGLang's wheel: make test-sglang")

from tests.engines.sglang.conftest import MakeStorage, flat_page, key_of
from tests.engines.sglang.pools import AnchorPool, HeadsPool, LatentPool
from tests.tiering.fs.slots import stored_blocks

from kvtier.base import OffloadKey
from kvtier.engines.sglang.pages import PagesInPlace, StagedPages, open_pages

HEADS_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LATENT_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
POOLS = [
    *(pytest.param(HeadsPool, layout, id=f"heads-{layout}") for layout in HEADS_LAYOUTS),
    *(pytest.param(LatentPool, layout, id=f"latents-{layout}") for layout in LATENT_LAYOUTS),
]
KEYS = [key_of(number) for number in range(16)]


@pytest.mark.parametrize(("kind", "layout"), POOLS)
@pytest.mark.parametrize("interface_v1", [0, 1])
def test_pages_come_back_into_other_slots_as_they_were(
    kind: Any, layout: str, interface_v1: int, make_storage: MakeStorage
) -> None:
    pool = kind(layout)
    pool.fill(1)
    storage = make_storage(pool, extra_config={"interface_v1": interface_v1})
    pages = [pool.page(number) for number in range(4)]
    assert storage.batch_set_v1(KEYS[:4], pool.slots(0, 1, 2, 3)) == [True] * 4
    assert storage.batch_exists(KEYS[:6]) == 4
    pool.fill(2)
    assert storage.batch_get_v1(KEYS[:5], pool.slots(9, 8, 7, 6, 5)) == [True] * 4 + [False]
    assert [pool.page(number) for number in (9, 8, 7, 6)] == pages


@pytest.mark.parametrize(("kind", "layout"), POOLS)
def test_a_load_changes_no_other_page(kind: Any, layout: str, make_storage: MakeStorage) -> None:
    pool = kind(layout)
    pool.fill(1)
    storage = make_storage(pool)
    assert storage.batch_set_v1(KEYS[:1], pool.slots(3)) == [True]
    pool.fill(2)
    others = [pool.page(number) for number in range(16) if number != 5]
    assert storage.batch_get_v1(KEYS[:1], pool.slots(5)) == [True]
    assert [pool.page(number) for number in range(16) if number != 5] == others


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head"])
def test_page_first_layouts_are_stored_and_loaded_in_place(layout: str) -> None:
    pages = open_pages(HeadsPool(layout), 1 << 20, has_values=False)
    assert isinstance(pages, PagesInPlace)
    assert pages.num_pieces == 2


def test_layer_first_pages_are_gathered_through_rows_of_kvtiers_own() -> None:
    pages = open_pages(HeadsPool("layer_first"), 1 << 20, has_values=False)
    assert isinstance(pages, StagedPages)
    assert pages.num_pieces == 1


def test_a_batch_larger_than_the_staging_rows_is_moved_in_several_calls(make_storage: MakeStorage) -> None:
    pool = HeadsPool("layer_first")
    pool.fill(1)
    storage = make_storage(pool, extra_config={"staging_bytes": "1B"})
    pages = [pool.page(number) for number in range(16)]
    assert storage.batch_set_v1(KEYS, pool.slots(*range(16))) == [True] * 16
    pool.fill(2)
    assert storage.batch_get_v1(KEYS, pool.slots(*range(16))) == [True] * 16
    assert [pool.page(number) for number in range(16)] == pages


@pytest.mark.parametrize("interface_v1", [0, 1])
def test_tensors_and_slots_name_the_same_pages(interface_v1: int, make_storage: MakeStorage) -> None:
    pool = HeadsPool("page_first")
    pool.fill(1)
    storage = make_storage(pool, extra_config={"interface_v1": interface_v1})
    page = flat_page(pool, 2)
    assert storage.set(KEYS[0], page)
    assert storage.batch_set(KEYS[1:3], [page, page])
    assert storage.exists(KEYS[0])
    assert not storage.exists(KEYS[9])
    assert storage.batch_get_v1(KEYS[:1], pool.slots(7)) == [True]
    assert pool.page(7) == pool.page(2)
    assert storage.batch_set_v1(KEYS[5:6], pool.slots(4)) == [True]
    target = torch.zeros_like(page)
    assert storage.get(KEYS[5], target) is target
    assert torch.equal(target.view(torch.uint8), flat_page(pool, 4).view(torch.uint8))
    assert storage.batch_get([KEYS[5], KEYS[9]], [target, torch.zeros_like(page)])[1] is None


def test_tensors_of_another_size_or_kind_are_no_pages(make_storage: MakeStorage) -> None:
    pool = HeadsPool("page_first")
    storage = make_storage(pool, extra_config={"interface_v1": 0})
    page = flat_page(pool, 0)
    assert not storage.set(KEYS[0], page[:-1])
    assert not storage.set(KEYS[0], None)
    assert not storage.batch_set(KEYS[:2], [page])
    assert storage.set(KEYS[0], page)
    assert storage.get(KEYS[0], None) is None
    assert storage.get(KEYS[0], torch.zeros_like(page)[:-1]) is None
    assert storage.get(KEYS[0], torch.zeros(2 * page.numel(), dtype=page.dtype)[::2]) is None
    assert storage.batch_get(KEYS[:2]) == [None, None]


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(torch.arange(60, 68), id="beyond the end"),
        pytest.param(torch.arange(-8, 0), id="negative"),
        pytest.param(torch.arange(2**40, 2**40 + 8), id="far away"),
        pytest.param(torch.arange(1, 9), id="not at a page"),
        pytest.param(torch.arange(0, 4), id="too few"),
        pytest.param(torch.arange(0, 12), id="too many"),
        pytest.param(torch.zeros(2, 4, dtype=torch.int64), id="two dimensions"),
        pytest.param(torch.zeros(8), id="not whole"),
        pytest.param(None, id="none"),
    ],
)
def test_slots_that_the_pool_does_not_have_are_false_for_their_pages(
    slots: torch.Tensor | None, make_storage: MakeStorage
) -> None:
    for layout in ("page_first", "layer_first"):
        pool = HeadsPool(layout)
        storage = make_storage(pool)
        good = storage.batch_set_v1(KEYS[:1], pool.slots(0))
        assert good == [True]
        assert storage.batch_set_v1(KEYS[1:3], slots)[1] is False
        assert storage.batch_get_v1([KEYS[0], KEYS[0]], slots)[1] is False


def test_only_the_page_outside_the_pool_is_false(make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    storage = make_storage(pool)
    slots = torch.cat([pool.slots(1), pool.slots(16), pool.slots(2)])
    assert storage.batch_set_v1(KEYS[:3], slots) == [True, False, True]


@pytest.mark.parametrize("kind", ["complex", "bool", "meta", "sparse"])
def test_slots_that_are_no_numbers_in_memory_are_false(kind: str, make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    storage = make_storage(pool)
    slots = pool.slots(0, 1)
    odd = {
        "complex": slots.to(torch.complex64),
        "bool": slots.to(torch.bool),
        "meta": slots.to("meta"),
        "sparse": slots.to_sparse(),
    }[kind]
    assert storage.batch_set_v1(KEYS[:2], odd) == [False, False]
    assert storage.batch_get_v1(KEYS[:2], odd) == [False, False]


def test_a_tensor_whose_bytes_are_not_beside_each_other_is_no_page(make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    storage = make_storage(pool)
    for page in (flat_page(pool, 0).to_sparse(), flat_page(pool, 0).to("meta")):
        assert storage.set(KEYS[0], page) is False
        assert storage.get(KEYS[0], page) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"hit_policy": ["all_pages"]},
        {"keys": 7},
        {"hit_policy": "block_groups", "block_pages": None, "group_pages": None},
        {"hit_policy": "block_groups", "block_pages": float("nan"), "group_pages": 1},
    ],
)
def test_a_transfer_of_another_form_is_no_hit_and_raises_nothing(
    changes: dict[str, Any], make_storage: MakeStorage
) -> None:
    pool = HeadsPool()
    storage = make_storage(pool)
    assert storage.batch_set_v1(KEYS[:2], pool.slots(0, 1)) == [True, True]
    transfer: Any = types.SimpleNamespace(
        **({"name": "kv", "keys": KEYS[:2], "host_indices": None, "hit_policy": "all_pages"} | changes)
    )
    assert storage.batch_exists_v2(KEYS[:2], [transfer]).kv_hit_pages == 0


@pytest.mark.parametrize("key", [None, 7, "", b"bytes", ["list"]])
def test_what_is_no_key_is_false(key: Any, make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    storage = make_storage(pool)
    assert storage.batch_set_v1([key, KEYS[0]], pool.slots(0, 1)) == [False, True]
    assert storage.batch_get_v1([key, KEYS[0]], pool.slots(0, 1)) == [False, True]
    assert storage.exists(key) is False
    assert storage.get(key, flat_page(pool, 0)) is None


@pytest.mark.parametrize("key", ["k", "../../etc/passwd", "A" * 64, "\0\ud800", "x" * 100_000])
def test_any_text_is_a_key(key: str, make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    pool.fill(1)
    storage = make_storage(pool)
    assert storage.batch_set_v1([key], pool.slots(0)) == [True]
    assert storage.exists(key)
    assert storage.batch_get_v1([key], pool.slots(1)) == [True]
    assert pool.page(0) == pool.page(1)


def test_a_key_named_twice_reaches_both_slots(make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    pool.fill(1)
    storage = make_storage(pool)
    assert storage.batch_set_v1([KEYS[0], KEYS[0]], pool.slots(0, 1)) == [True, True]
    page = pool.page(0)
    assert storage.batch_get_v1([KEYS[0], KEYS[0]], pool.slots(4, 5)) == [True, True]
    assert pool.page(4) == pool.page(5) == page


def test_a_page_of_two_pieces_is_held_only_with_both(make_storage: MakeStorage, tmp_path: Path) -> None:
    pool = HeadsPool("page_first")
    storage = make_storage(pool)
    assert storage.batch_set_v1(KEYS[:1], pool.slots(0)) == [True]
    first, second = [block for block in stored_blocks(tmp_path / "kv") if KEYS[0][:20] in block.name.hex()]
    assert first.name != second.name
    tier = storage._stores["kv"]._tier
    tier.drop([OffloadKey(first.name)])
    tier.drain(60.0)
    assert storage.batch_exists(KEYS[:1]) == 0
    assert storage.batch_get_v1(KEYS[:1], pool.slots(1)) == [False]


def test_a_damaged_page_is_a_miss(make_storage: MakeStorage, tmp_path: Path) -> None:
    pool = HeadsPool("page_first")
    pool.fill(3)
    storage = make_storage(pool)
    assert storage.batch_set_v1(KEYS[:1], pool.slots(0)) == [True]
    first, *_ = [block for block in stored_blocks(tmp_path / "kv") if KEYS[0][:20] in block.name.hex()]
    first.flip()
    assert storage.batch_get_v1(KEYS[:1], pool.slots(1)) == [False]


def test_clear_removes_the_pages_and_storing_goes_on(make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    storage = make_storage(pool)
    assert storage.batch_set_v1(KEYS[:3], pool.slots(0, 1, 2)) == [True] * 3
    assert storage.clear()
    assert storage.batch_exists(KEYS[:3]) == 0
    assert storage.batch_get_v1(KEYS[:3], pool.slots(0, 1, 2)) == [False] * 3
    assert storage.batch_set_v1(KEYS[:3], pool.slots(0, 1, 2)) == [True] * 3
    assert storage.batch_exists(KEYS[:3]) == 3


def test_a_backend_that_is_attached_again_finds_what_was_stored(make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    pool.fill(1)
    storage = make_storage(pool)
    assert storage.batch_set_v1(KEYS[:3], pool.slots(0, 1, 2)) == [True] * 3
    page = pool.page(1)
    storage.close()
    storage.close()
    again = make_storage(pool)
    assert again.batch_exists(KEYS[:4]) == 3
    assert again.batch_get_v1(KEYS[1:2], pool.slots(9)) == [True]
    assert pool.page(9) == page


def test_calls_after_the_end_and_before_a_pool_are_false(make_storage: MakeStorage) -> None:
    pool = HeadsPool()
    storage = make_storage()
    for _ in range(2):
        assert storage.batch_exists(KEYS) == 0
        assert storage.batch_set_v1(KEYS[:1], pool.slots(0)) == [False]
        assert storage.batch_get_v1(KEYS[:1], pool.slots(0)) == [False]
        assert not storage.set(KEYS[0], flat_page(pool, 0))
        assert storage.get(KEYS[0], flat_page(pool, 0)) is None
        storage = make_storage(pool)
        storage.close()
    assert not storage.clear()


def test_an_anchor_without_memory_has_nothing_to_move(make_storage: MakeStorage) -> None:
    storage = make_storage(AnchorPool())
    slots = torch.arange(8)
    assert storage.batch_set_v1(KEYS[:2], slots) == [True, True]
    assert storage.batch_get_v1(KEYS[:2], slots) == [True, True]
    assert storage.batch_exists(KEYS[:2]) == 0, "no bytes are held for these pages"
