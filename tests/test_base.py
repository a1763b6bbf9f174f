"""The vocabulary: keys, load/store specs, requests, defaults of the contracts."""

from collections.abc import Collection

import numpy as np
import pytest

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


@pytest.mark.parametrize("tenant", [0, 1, 256, MAX_TENANT_NUMBER])
@pytest.mark.parametrize("group_idx", [0, 1, 255])
@pytest.mark.parametrize("block_hash", [b"", b"\x00", bytes(range(32))])
def test_a_key_gives_back_its_hash_group_and_tenant(block_hash: bytes, group_idx: int, tenant: int) -> None:
    key = make_offload_key(block_hash, group_idx, tenant)
    assert make_offload_keys([block_hash], group_idx, tenant) == [key]
    assert (get_offload_block_hash(key), get_offload_group_idx(key)) == (block_hash, group_idx)
    assert get_offload_tenant(key) == tenant


def test_tenant_and_group_are_four_bytes_big_endian_at_the_end() -> None:
    assert make_offload_key(b"hash", 2) == b"hash\x00\x00\x00\x02"
    assert make_offload_key(b"hash", 2, 258) == b"hash\x00\x01\x02\x02"


@pytest.mark.parametrize(("group_idx", "tenant"), [(-1, 0), (256, 0), (0, -1), (0, MAX_TENANT_NUMBER + 1)])
def test_a_group_or_tenant_that_does_not_fit_is_refused(group_idx: int, tenant: int) -> None:
    with pytest.raises(OverflowError):
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
