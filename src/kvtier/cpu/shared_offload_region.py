"""Rows of the primary tier in shared memory, mapped by all processes of an engine.

Pages are mapped before the first transfer needs them, by several threads: a first touch inside a copy costs a page
fault per 4 KiB, which halves the copy's bandwidth. Mapping changes no byte, so a process that joins a region in use
may do it.
"""

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from kvtier.cpu.region_file import (
    DEFAULT_JOIN_TIMEOUT_S,
    SHARED_MEMORY_DIRECTORY,
    RegionFile,
    RegionGeometry,
    RegionIdentity,
    leave_region_file,
    make_region_path,
    open_region_file,
    remove_name,
)
from kvtier.errors import RegionError, RegionGeometryError, RegionMemoryError, WorkerAreaError
from kvtier.limits import count_usable_cores

MADV_POPULATE_WRITE = 23
"""Not in Python 3.11's mmap module; Linux 5.14 and later."""

CHUNK_BYTES = 64 << 20
"""Bytes populated with one system call. Smaller chunks balance better, larger ones make fewer calls."""

MAX_PREFAULT_THREADS = 8
"""Zeroing memory is bound by its bandwidth, which about eight cores saturate."""


class SharedOffloadRegion:
    """Rows of the primary tier in shared memory.

    Thread: one thread builds, seals and cleans up; any thread may use views.

    Args:
        instance_id: the engine's id, the same in all its processes, different from other engines of the user.
        total_size_bytes: bytes of all rows; must be ``row_stride * num_blocks``.
        num_blocks: slots.
        rank: this worker's number, from 0; None on the scheduler's side.
        num_workers: workers side by side in a row.
        cpu_page_size: bytes of one worker's part of a row.
        row_alignment_bytes: ``row_stride`` is a multiple of it.
        prefault: whether to map each page now instead of at its first use.
        directory: the shared-memory mount.
        join_timeout_s: seconds to wait for another process that creates the region.

    Raises:
        RegionGeometryError: the numbers do not fit together, or the region is in use with others.
        RegionMemoryError: there is no memory for it.
        RegionOwnerError: the file is another user's.
        RegionError: its creator did not finish in time.

    Attributes:
        mmap_path: the file's name, until it is sealed.
        fd: the file's descriptor; -1 after cleanup.
        mmap_obj: the mapping; None after cleanup.
        total_size_bytes: bytes of all rows.
        num_blocks: slots.
        rank: as given.
        row_stride: bytes from one row to the next.
        num_workers: as given.
        cpu_page_size: as given.
        identity: (device, inode) of the file, by which a name is known to lead to it.
        shared_identity: equal in exactly the processes that share the memory, whatever their machine.
        is_creator: whether this process created the file.
    """

    def __init__(
        self,
        instance_id: str,
        total_size_bytes: int,
        num_blocks: int,
        rank: int | None,
        num_workers: int,
        cpu_page_size: int,
        *,
        row_alignment_bytes: int = 1,
        prefault: bool = True,
        directory: str | Path = SHARED_MEMORY_DIRECTORY,
        join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S,
    ) -> None:
        geometry = plan_geometry(
            total_size_bytes, num_blocks, rank, num_workers, cpu_page_size, row_alignment_bytes
        )
        self.total_size_bytes = total_size_bytes
        self.num_blocks = num_blocks
        self.rank = rank
        self.row_stride = geometry.row_stride
        self.num_workers = num_workers
        self.cpu_page_size = cpu_page_size
        self._next_view_offset = 0
        path = make_region_path(instance_id, Path(directory))
        self._file = open_region_file(path, geometry, join_timeout_s=join_timeout_s)
        self.mmap_path = str(path)
        self.fd = self._file.fd
        self.identity = self._file.identity
        self.shared_identity: RegionIdentity = (self._file.identity[1], self._file.token)
        self.is_creator = self._file.is_creator
        self.mmap_obj: mmap.mmap | None = _map(self._file, total_size_bytes, is_prefaulted=prefault)

    def create_next_view(self, tensor_page_size: int) -> torch.Tensor:
        """Return the next bytes of this worker's part of every row.

        Args:
            tensor_page_size: bytes of each row.

        Returns:
            Shape (num_blocks, tensor_page_size), int8, CPU, strided over the rows, zero-copy.

        Raises:
            WorkerAreaError: this process has no part, or less of it is left; nothing has moved.
            RegionError: the region is cleaned up.
        """
        if self.rank is None:
            raise WorkerAreaError(
                f"region {self.mmap_path}: the scheduler's side (rank=None) has no part of a row: "
                "use create_kv_memoryview for whole rows"
            )
        end = self._next_view_offset + tensor_page_size
        if tensor_page_size < 1 or end > self.cpu_page_size:
            raise WorkerAreaError(
                f"a view of {tensor_page_size} bytes at {self._next_view_offset} exceeds worker area end: "
                f"worker {self.rank} has {self.cpu_page_size} bytes of each row"
            )
        rows = np.frombuffer(self.mapping(), dtype=np.int8).reshape(self.num_blocks, self.row_stride)
        part_start = self.rank * self.cpu_page_size
        view = torch.from_numpy(rows[:, part_start + self._next_view_offset : part_start + end])
        self._next_view_offset = end
        return view

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows: writable, zero-copy, shape (num_blocks, row_stride), format 'b'.

        Raises:
            RegionError: the region is cleaned up.
        """
        return memoryview(self.mapping()).cast("b", shape=[self.num_blocks, self.row_stride])

    def seal(self) -> None:
        """Unlink the name, so that the kernel frees the memory however the processes die; idempotent.

        Without effect in a forked child.
        """
        if not self._file.is_inherited:
            remove_name(self._file.path, self.identity)

    def cleanup(self) -> None:
        """Release the mapping, the descriptor and, in the last process, the name; idempotent.

        Memory with a live view is unmapped with the last of its views.
        """
        mapping, self.mmap_obj = self.mmap_obj, None
        if mapping is None:
            return
        self.fd = -1
        leave_region_file(self._file)
        with suppress(BufferError):  # raised while views are alive; the mapping goes with the last of them
            mapping.close()

    def mapping(self) -> mmap.mmap:
        """Return the mapping.

        Raises:
            RegionError: the region is cleaned up.
        """
        if self.mmap_obj is None:
            raise RegionError(f"region {self.mmap_path} is cleaned up: build a new one")
        return self.mmap_obj

    def __repr__(self) -> str:
        state = "cleaned up" if self.mmap_obj is None else f"rank={self.rank}, fd={self.fd}"
        return f"SharedOffloadRegion({self.mmap_path}, {self.num_blocks} x {self.row_stride} bytes, {state})"


def prefault_pages(mapping: mmap.mmap, size_bytes: int) -> None:
    """Make every page of the first ``size_bytes`` present and writable; their bytes are unchanged.

    Raises:
        RegionMemoryError: the kernel has no memory for a page.

    Thread: blocks the caller, without the interpreter lock, until the last page is present.
    """
    view = np.frombuffer(mapping, dtype=np.int8, count=size_bytes)
    starts = range(0, size_bytes, CHUNK_BYTES)
    num_threads = min(MAX_PREFAULT_THREADS, count_usable_cores(), len(starts))
    with ThreadPoolExecutor(num_threads, "kvtier-prefault") as pool:
        for done in [pool.submit(_populate, view[start : start + CHUNK_BYTES]) for start in starts]:
            done.result()


def plan_geometry(
    total_size_bytes: int,
    num_blocks: int,
    rank: int | None,
    num_workers: int,
    cpu_page_size: int,
    row_alignment_bytes: int,
) -> RegionGeometry:
    """Derive the shape of a region and check that the numbers fit together. Pure.

    Raises:
        RegionGeometryError: they do not.
    """
    if min(num_blocks, num_workers, cpu_page_size, row_alignment_bytes) < 1:
        raise RegionGeometryError(
            f"num_blocks={num_blocks}, num_workers={num_workers}, cpu_page_size={cpu_page_size} and "
            f"row_alignment_bytes={row_alignment_bytes} must each be at least 1"
        )
    if rank is not None and not 0 <= rank < num_workers:
        raise RegionGeometryError(f"rank={rank}: must be None or one of the {num_workers} workers, from 0")
    row_stride = plan_row_stride(cpu_page_size, num_workers, row_alignment_bytes)
    if total_size_bytes != row_stride * num_blocks:
        raise RegionGeometryError(
            f"total_size_bytes={total_size_bytes}: {num_blocks} rows of {row_stride} bytes "
            f"({num_workers} x {cpu_page_size}, rounded up to {row_alignment_bytes}) need "
            f"{row_stride * num_blocks}"
        )
    return RegionGeometry(num_blocks, row_stride, num_workers, cpu_page_size)


def plan_row_stride(cpu_page_size: int, num_workers: int, row_alignment_bytes: int) -> int:
    """Return the bytes from one row to the next: all workers' parts, rounded up. Pure."""
    return -(-cpu_page_size * num_workers // row_alignment_bytes) * row_alignment_bytes


def _populate(chunk: npt.NDArray[np.int8]) -> None:
    """Populate with one system call; on older kernels, read a byte of each page.

    Not ``mmap.madvise``, which holds the interpreter lock in Python 3.11; ctypes does not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    address, length = ctypes.c_void_p(chunk.ctypes.data), ctypes.c_size_t(chunk.nbytes)
    if libc.madvise(address, length, MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:
        raise RegionMemoryError(
            f"{chunk.nbytes} bytes of the region cannot be mapped ({os.strerror(code)}): lower cpu_bytes_to_use"
        )
    chunk[:: mmap.PAGESIZE].max()


def _map(file: RegionFile, size_bytes: int, *, is_prefaulted: bool) -> mmap.mmap:
    """Map the rows; on failure the file is closed again."""
    try:
        mapping = mmap.mmap(file.fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if is_prefaulted:
            prefault_pages(mapping, size_bytes)
    except BaseException:
        leave_region_file(file)
        raise
    return mapping
