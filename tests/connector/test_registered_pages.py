"""Pages are registered in full or refused: a page of another size would come back in part."""

from collections.abc import Iterator

import pytest
import torch

from kvtier.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from kvtier.config import GroupKind, KVGroup, ModelIdentity, OffloadingConfig
from kvtier.connector.worker import OffloadingConnectorWorker
from kvtier.cpu.spec import CPUOffloadingSpec
from kvtier.errors import KVCacheLayoutError

NUM_DEVICE_BLOCKS = 8
FULL = KVGroup(16, ("layer.0", "layer.1"), 1024)
WINDOW = KVGroup(16, ("layer.2",), 512, GroupKind.WINDOW, window_tokens=64)

Pages = tuple[int, ...]


def caches_of(*groups: Pages, padding_bytes: int = 0) -> CanonicalKVCaches:
    """Return caches with a tensor for each page of each group, pages padded by so many bytes."""
    tensors: list[CanonicalKVCacheTensor] = []
    refs: list[list[CanonicalKVCacheRef]] = []
    for pages in groups:
        refs.append([CanonicalKVCacheRef(len(tensors) + nth, page) for nth, page in enumerate(pages)])
        for page in pages:
            padded = page + padding_bytes
            memory = torch.zeros((NUM_DEVICE_BLOCKS, padded), dtype=torch.int8)
            tensors.append(CanonicalKVCacheTensor(memory, padded))
    return CanonicalKVCaches(tensors, refs)


@pytest.fixture
def half() -> Iterator[OffloadingConnectorWorker]:
    """A worker half of a model with two groups, of 1024 and of 512 bytes a page, without KV cache yet."""
    extra = {"cpu_bytes_to_use": 8 * 1024}
    config = OffloadingConfig("engine", ModelIdentity("m"), (FULL, WINDOW), 16, rank=0, extra_config=extra)
    spec = CPUOffloadingSpec(config)
    yield OffloadingConnectorWorker(spec)
    spec.shutdown()


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        pytest.param(
            ((256, 256), (512,)), ("group 0", "layer.0", "512 bytes", "=1024"), id="half in group 0"
        ),
        pytest.param(
            ((512, 256), (512,)), ("group 0", "tensor 1: 256", "768 bytes", "=1024"), id="half a layer"
        ),
        pytest.param(((512, 512), (256,)), ("group 1", "layer.2", "256 bytes", "=512"), id="half in group 1"),
        pytest.param(
            ((1024, 1024), (512,)), ("group 0", "tensor 0: 1024", "2048 bytes"), id="double in group 0"
        ),
        # It fits the row, which has the length of the largest group.
        pytest.param(((512, 512), (1024,)), ("group 1", "tensor 2: 1024", "=512"), id="double in group 1"),
        pytest.param(((512,), (512,)), ("group 0", "512 bytes", "=1024"), id="a layer is missing"),
        pytest.param(((512,), (512, 512)), ("group 0", "512 bytes", "=1024"), id="groups in another order"),
        pytest.param(((512, 512),), ("1 groups", "configuration has 2"), id="a group is missing"),
    ],
)
@pytest.mark.parametrize("padding_bytes", [0, 512])
def test_pages_of_another_size_are_refused_by_group_tensor_and_both_sizes(
    half: OffloadingConnectorWorker, groups: tuple[Pages, ...], named: tuple[str, ...], padding_bytes: int
) -> None:
    with pytest.raises(KVCacheLayoutError) as refused:
        half.register_kv_caches(caches_of(*groups, padding_bytes=padding_bytes))

    assert [part for part in (*named, "register") if part not in str(refused.value)] == []


@pytest.mark.parametrize("padding_bytes", [0, 512])
@pytest.mark.parametrize("groups", [((512, 512), (512,)), ((1024,), (256, 256))])
def test_pages_of_the_configured_size_are_taken_padded_or_not(
    half: OffloadingConnectorWorker, groups: tuple[Pages, ...], padding_bytes: int
) -> None:
    half.register_kv_caches(caches_of(*groups, padding_bytes=padding_bytes))

    assert half.build_connector_worker_meta() is None


@pytest.mark.parametrize("real_bytes", [512, 2048])
def test_a_tensor_with_other_pages_than_it_says_is_refused_with_both_sizes(
    half: OffloadingConnectorWorker, real_bytes: int
) -> None:
    said = caches_of((1024,), (512,))
    real = torch.zeros((NUM_DEVICE_BLOCKS, real_bytes), dtype=torch.int8)
    tensors = [CanonicalKVCacheTensor(real, 1024), said.tensors[1]]

    with pytest.raises(KVCacheLayoutError, match=rf"tensor 0 has {real_bytes} bytes.*page_size_bytes=1024"):
        half.register_kv_caches(CanonicalKVCaches(tensors, said.group_data_refs))
