"""Memory that direct I/O accepts is told from memory that it does not."""

import numpy as np

from kvtier.testing.tier_suite import make_rows
from kvtier.tiering.kit.disk import is_aligned


def test_rows_are_aligned_in_address_and_length() -> None:
    assert is_aligned(make_rows(4, 8192))
    assert not is_aligned(make_rows(4, 8192 + 512))
    memory = np.zeros(3 * 4096, np.int8)
    start = -memory.ctypes.data % 4096 + 64
    assert not is_aligned(memory[start : start + 4096].reshape(1, 4096).data)
