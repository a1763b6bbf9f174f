"""Which keys are read and which device blocks are written."""

import pytest

from kvtier.base import OffloadKey
from kvtier.connector.groups import GroupLayout
from kvtier.connector.planning import iterate_load_keys, plan_load
from kvtier.errors import InvariantError

FULL = GroupLayout(0, 4, 2, 2, None)
WINDOW = GroupLayout(1, 4, 2, 2, num_tail_tokens=4)
KEYS = [[OffloadKey(bytes([group, n])) for n in range(3)] for group in range(2)]


def test_a_load_enters_the_middle_of_its_first_block() -> None:
    plan = plan_load([FULL], KEYS, [[10, 11, 12, 13]], first_token=4, end_token=16)

    assert plan.keys == KEYS[0][:2]
    assert plan.device_spec.block_ids.tolist() == [11, 12, 13]
    assert plan.device_spec.group_sizes == (3,)
    assert plan.device_spec.block_indices == (1,)


def test_device_blocks_are_ordered_by_group_and_a_window_loads_its_tail_only() -> None:
    tables = [[10, 11, 12, 13], [0, 0, 22, 23]]

    plan = plan_load([FULL, WINDOW], KEYS, tables, first_token=0, end_token=16)

    assert plan.keys == [*KEYS[0][:2], KEYS[1][1]]
    assert plan.device_spec.block_ids.tolist() == [10, 11, 12, 13, 23]
    assert plan.device_spec.group_sizes == (4, 1)
    assert plan.device_spec.block_indices == (0, 3)


def test_keys_alone_come_as_the_plan_reads_them() -> None:
    assert list(iterate_load_keys([FULL, WINDOW], KEYS, 8, 24)) == [*KEYS[0][1:3], KEYS[1][2]]


def test_fewer_device_blocks_than_promised_are_refused() -> None:
    with pytest.raises(InvariantError, match="needs 4"):
        plan_load([FULL], KEYS, [[10, 11, 12]], first_token=0, end_token=16)
