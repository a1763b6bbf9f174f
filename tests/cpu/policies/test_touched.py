"""A touch that names a block in flight puts in order what is being stored, and counts no use."""

import pytest

from kvtier.base import ReqContext
from kvtier.cpu.manager import CPUOffloadingManager
from kvtier.cpu.policies.base import BlockStatus
from kvtier.cpu.policies.touched import find_touched
from kvtier.testing.policy_suite import key_of

KEYS = [key_of(number) for number in range(8)]
REQUEST = ReqContext("a")


def test_held_keys_come_once_and_the_first_named_last() -> None:
    blocks = {key: BlockStatus(number) for number, key in enumerate(KEYS[:4])}
    blocks[KEYS[0]].ref_cnt, blocks[KEYS[3]].ref_cnt = 0, 2
    touched = find_touched(blocks.get, [KEYS[3], KEYS[0], KEYS[7], KEYS[1], KEYS[3]])
    assert touched == ([KEYS[1], KEYS[0], KEYS[3]], [KEYS[1]])
    assert not touched.is_use


def test_a_touch_of_ready_blocks_or_of_nothing_held_is_a_use() -> None:
    blocks = {KEYS[0]: BlockStatus(0)}
    blocks[KEYS[0]].ref_cnt = 0
    assert find_touched(blocks.get, KEYS[:2]).is_use
    assert find_touched(blocks.get, KEYS[4:]) == ([], [])


@pytest.mark.parametrize("policy", ["s3fifo", "sieve", "mq"])
def test_a_prompt_that_is_stored_in_chunks_looks_no_more_used_than_one_that_was_used_once(
    policy: str,
) -> None:
    """Six blocks in three chunks leave before a block that one other request has used three times."""
    manager = CPUOffloadingManager(8, policy)

    def store(number: int, end: int) -> None:
        assert manager.prepare_store(KEYS[number:end], REQUEST) is not None
        manager.touch(KEYS[number:end], REQUEST)
        manager.complete_store(KEYS[number:end], REQUEST)

    store(0, 1)
    for _ in range(3):
        manager.touch(KEYS[:1], REQUEST)
    for end in (3, 5, 7):
        store(1, end)
    victims = manager.table.policy.evict(6, frozenset())
    assert victims is not None
    assert KEYS[0] not in dict(victims)
