"""The vocabulary: keys, load/store specs, requests, defaults of the contracts."""

from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.base import (
    MAX_TENANT_NUMBER,
    BlockIDsLoadStoreSpec,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
    get_offload_tenant,
    make_offload_key,
    make_offload_keys,
)
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.errors import KVCacheLayoutError
from kvtier.tenants import get_tenant_part
from kvtier.tiering.kit.envelope import MAX_KEY_BYTES


class MinimalManager(OffloadingManager):
    """The three methods that a manager must supply."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        return False

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        return CPULoadStoreSpec([])

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        return None


HASHES = st.one_of(
    st.sampled_from([b"", b"\x00", bytes(7), bytes(32), bytes(28) + b"\x00\x00\x00\x01"]),
    st.binary(max_size=32),
)
NUMBERS = st.one_of(
    st.sampled_from([1, 256, 2**24 + 1, 2**56 - 2**24 + 1, MAX_TENANT_NUMBER]),
    st.integers(1, MAX_TENANT_NUMBER).filter(lambda number: number % 2**24 != 0),
)


@given(HASHES, st.one_of(st.just(0), NUMBERS))
def test_a_key_gives_back_its_hash_group_and_tenant_for_every_group(block_hash: bytes, tenant: int) -> None:
    for group_idx in range(256):
        key = make_offload_key(block_hash, group_idx, tenant)
        assert make_offload_keys([block_hash], group_idx, tenant) == [key]
        assert (get_offload_block_hash(key), get_offload_group_idx(key)) == (block_hash, group_idx)
        assert get_offload_tenant(key) == tenant


@given(st.tuples(HASHES, NUMBERS), st.tuples(HASHES, NUMBERS))
def test_what_shows_a_tenant_in_a_key_is_never_that_of_another_nor_of_none(
    one: tuple[bytes, int], other: tuple[bytes, int]
) -> None:
    part, digits = get_tenant_part(one[1])
    of_none, zeros = get_tenant_part(0)
    for group_idx in (0, 1, 127, 255):
        own, plain = make_offload_key(one[0], group_idx, one[1]), make_offload_key(one[0], group_idx)
        assert own[part] == digits
        assert plain[part] != digits
        assert plain[of_none] == zeros
        assert own[of_none] != zeros
        assert (make_offload_key(other[0], group_idx, other[1])[part] == digits) is (one[1] == other[1])


def test_without_a_tenant_the_group_is_four_bytes_big_endian_at_the_end_and_with_one_its_number_and_one() -> (
    None
):
    assert make_offload_key(b"hash", 2) == b"hash\x00\x00\x00\x02"
    assert make_offload_key(b"hash", 2, 258) == b"hash\x00\x00\x00\x00\x00\x01\x02\x02"


def test_a_header_has_room_for_a_sha256_with_a_tenant() -> None:
    assert len(make_offload_key(bytes(32), 255, MAX_TENANT_NUMBER)) == MAX_KEY_BYTES == 40


@pytest.mark.parametrize(
    ("group_idx", "tenant", "said"),
    [
        (-1, 0, "group_idx=-1"),
        (256, 0, "group_idx=256: must be 0 to 255"),
        (256, 1, "group_idx=256: must be 0 to 255"),
        (0, -1, "tenant=-1"),
        (0, MAX_TENANT_NUMBER + 1, "below 2\\^56"),
        (0, 2**24, "no multiple of 2\\^24"),
    ],
)
def test_a_group_or_tenant_that_does_not_fit_is_refused_in_words(
    group_idx: int, tenant: int, said: str
) -> None:
    with pytest.raises(OverflowError, match=said):
        make_offload_key(b"hash", group_idx, tenant)


def test_requests_are_compared_by_identity() -> None:
    first, second = ReqContext("r"), ReqContext("r")
    assert first != second
    assert len({first, second, first}) == 2


@pytest.mark.parametrize("block_ids", [[3, 1], (3, 1), np.array([3, 1], dtype=np.int32), iter([3, 1])])
def test_block_ids_are_a_flat_int64_array(block_ids: Collection[int]) -> None:
    spec = CPULoadStoreSpec(block_ids)
    assert spec.block_ids.dtype == np.int64
    assert spec.block_ids.shape == (2,)
    assert repr(spec) == "CPULoadStoreSpec([3, 1])"


def test_no_blocks_are_an_empty_int64_array() -> None:
    spec = CPULoadStoreSpec([])
    assert spec.block_ids.dtype == np.int64
    assert spec.block_ids.shape == (0,)


def test_media_are_named() -> None:
    assert (GPULoadStoreSpec.medium(), CPULoadStoreSpec.medium()) == ("GPU", "CPU")


def test_an_abstract_spec_cannot_be_built() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BlockIDsLoadStoreSpec([1])  # type: ignore[abstract] # that is what is proven


def test_device_blocks_keep_their_groups() -> None:
    spec = GPULoadStoreSpec([5, 6, 7], group_sizes=[2, 0, 1], block_indices=[4, 0, 9])
    assert (spec.group_sizes, spec.block_indices) == ((2, 0, 1), (4, 0, 9))


def test_group_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(KVCacheLayoutError, match=r"sum to 3 but there are 2 block ids"):
        GPULoadStoreSpec([1, 2], group_sizes=[2, 1], block_indices=[0, 0])


def test_a_block_index_for_each_group_is_required() -> None:
    with pytest.raises(KVCacheLayoutError, match="2 group sizes but 1 block indices"):
        GPULoadStoreSpec([1, 2], group_sizes=[1, 1], block_indices=[0])


def test_a_minimal_manager_has_harmless_defaults() -> None:
    manager, request = MinimalManager(), ReqContext("r")
    manager.touch([], request)
    manager.complete_load([], request)
    manager.complete_store([], request, success=False)
    manager.end_step()
    manager.request_finished(request)
    manager.reset()
    manager.shutdown()
    assert list(manager.take_events()) == []
    assert (manager.has_pending_work(), manager.is_waiting(request), manager.stats()) == (False, False, {})
