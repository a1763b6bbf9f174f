"""Prefaulting makes pages present and changes no byte, with the system call and without."""

import mmap
import os

import numpy as np
import pytest

from kvtier.cpu import shared_offload_region as module
from kvtier.cpu.shared_offload_region import CHUNK_BYTES, prefault_pages


@pytest.mark.parametrize("advice", [module.MADV_POPULATE_WRITE, 9999])
def test_every_page_is_present_and_keeps_its_bytes(advice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second advice is one that no kernel knows, as kernels before 5.14 do not know the first."""
    monkeypatch.setattr(module, "MADV_POPULATE_WRITE", advice)
    size = CHUNK_BYTES + 3 * mmap.PAGESIZE + 5
    descriptor = os.memfd_create("kvtier-test-prefault")
    os.ftruncate(descriptor, size)
    os.pwrite(descriptor, b"kept", size - 4)
    with mmap.mmap(descriptor, size) as mapping:
        before = resident_bytes()

        prefault_pages(mapping, size)

        assert resident_bytes() - before > size * 0.9
        assert mapping[size - 4 :] == b"kept"
        assert not np.frombuffer(mapping, np.int8, count=1 << 20).any()
    os.close(descriptor)


def resident_bytes() -> int:
    """Return how much shared memory this process has mapped and present."""
    with open("/proc/self/statm") as statm:  # noqa: PTH123  # a file of the kernel, read in one line
        return int(statm.read().split()[2]) * mmap.PAGESIZE
