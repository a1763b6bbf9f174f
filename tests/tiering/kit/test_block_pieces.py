"""Files of holes are told from blocks by what they take of the disk."""

import pytest

from kvtier.tiering.kit.block_pieces import is_hollow


@pytest.mark.parametrize(
    ("num_bytes", "num_disk_blocks", "expected"),
    [(2**30, 0, False), (2**30 + 1, 8, True), (2**40, 2**40 // 512, False), (2**40, 2**33 // 512, True)],
)
def test_only_long_files_of_holes_are_hollow(num_bytes: int, num_disk_blocks: int, *, expected: bool) -> None:
    assert is_hollow(num_bytes, num_disk_blocks) is expected


@pytest.mark.parametrize(
    ("num_bytes", "num_disk_blocks", "expected"),
    [(2**26, 0, False), (2**26 + 1, 8, True), (2**28, 2**26 // 512, True), (2**28, 2**27 // 512, False)],
)
def test_of_an_encrypted_block_half_must_be_on_the_disk(
    num_bytes: int, num_disk_blocks: int, *, expected: bool
) -> None:
    assert is_hollow(num_bytes, num_disk_blocks, is_encrypted=True) is expected
