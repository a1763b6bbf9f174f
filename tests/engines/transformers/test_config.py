"""Sizes that are left open fit the model; those that are given are checked."""

from typing import Any

import pytest
import torch

from kvtier.config import GroupKind
from kvtier.engines.transformers import EngineConfig
from kvtier.engines.transformers.config import (
    BlockSizes,
    choose_block_sizes,
    describe_waste,
    page_bytes,
)
from kvtier.engines.transformers.identity import make_groups
from kvtier.engines.transformers.model_adapter import KVShape, LayerShape, StateKind, StateShape
from kvtier.errors import ConfigError

LAYER = LayerShape("layers.0", 2, 16, 2, 16)
"""128 bytes a token."""

ATTENTION = KVShape((LAYER,), torch.bfloat16, torch.device("cpu"))


def with_states(num_bytes: int, dtype: torch.dtype = torch.bfloat16, *, has_keys: bool = True) -> KVShape:
    elements = num_bytes // dtype.itemsize
    state = StateShape("layers.1", StateKind.RECURRENT, 0, (1, elements), dtype)
    return KVShape((LAYER,) if has_keys else (), torch.bfloat16, torch.device("cpu"), (state,), 2)


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        (ATTENTION, {}, BlockSizes(16)),
        (ATTENTION, {"block_size_tokens": 32}, BlockSizes(32)),
        # A state as large as 500 tokens.
        (with_states(64_000), {}, BlockSizes(512, 512)),
        (with_states(64_000), {"block_size_tokens": 100}, BlockSizes(100, 500)),
        (with_states(64_000), {"state_interval_tokens": 48}, BlockSizes(48, 48)),
        (with_states(64_000), {"block_size_tokens": 16, "state_interval_tokens": 48}, BlockSizes(16, 48)),
        (with_states(1_280), {}, BlockSizes(256, 256)),
        (with_states(12_800_000), {}, BlockSizes(1024, 1024)),
        (with_states(64_000, has_keys=False), {}, BlockSizes(1024, 1024, has_keys=False)),
    ],
)
def test_what_is_left_open_is_chosen_by_the_model(
    shape: KVShape, given: dict[str, Any], expected: BlockSizes
) -> None:
    assert choose_block_sizes(EngineConfig(4, **given), shape) == expected


@pytest.mark.parametrize(
    ("shape", "given", "message"),
    [
        (ATTENTION, {"state_interval_tokens": 64}, "this one has none"),
        (
            with_states(1_280),
            {"block_size_tokens": 16, "state_interval_tokens": 40},
            "multiple of block_size_tokens",
        ),
    ],
)
def test_sizes_that_cannot_work_are_refused(shape: KVShape, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_block_sizes(EngineConfig(4, **given), shape)


@pytest.mark.parametrize("interval", [0, -16, True, 1.5, "256"])
def test_an_interval_is_a_number_of_tokens(interval: Any) -> None:  # noqa: ANN401 - what a user may write
    with pytest.raises(ConfigError, match="state_interval_tokens"):
        EngineConfig(4, state_interval_tokens=interval)


def test_a_page_has_room_for_a_block_and_for_the_states() -> None:
    assert page_bytes(with_states(1_282), BlockSizes(8, 8)) == 1_288
    assert page_bytes(with_states(1_282), BlockSizes(16, 16)) == 16 * 128


def test_states_are_a_group_whose_name_tells_type_and_size() -> None:
    sizes = BlockSizes(16, 48)
    attention, states = make_groups(with_states(1_280), sizes)
    assert (attention.kind, attention.block_size_tokens) == (GroupKind.FULL, 16)
    assert (states.kind, states.block_size_tokens, states.page_size_bytes) == (GroupKind.STATE, 48, 1_280)
    assert states.layer_names == ("layers.1.recurrent.0:bfloat16[1,640]",)
    others = [with_states(1_280, torch.float32), with_states(1_280, torch.float16)]
    assert len({make_groups(shape, sizes) for shape in [with_states(1_280), *others]}) == 3


def test_a_model_of_states_alone_has_one_group() -> None:
    (states,) = make_groups(with_states(1_280, has_keys=False), BlockSizes(16, 16, has_keys=False))
    assert states.kind is GroupKind.STATE


def test_pages_that_blocks_hardly_fill_are_warned_of() -> None:
    assert describe_waste(ATTENTION, BlockSizes(16)) == ""
    assert describe_waste(with_states(64_000), BlockSizes(512, 512)) == ""
    assert describe_waste(with_states(64_000, has_keys=False), BlockSizes(16, 16, has_keys=False)) == ""
    warning = describe_waste(with_states(64_000), BlockSizes(16, 512))
    assert "2048 bytes and takes a page of 64000" in warning
    assert "at 500" in warning
