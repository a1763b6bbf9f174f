"""How the pages of SGLang's host pools become rows that a tier moves.

SGLang names a page by the numbers of its slots. Where each page is one or two pieces of equal size at regular places
(the page-first layouts), the pool's own memory is the rows: nothing is copied, and a page is as many blocks as pieces.
Elsewhere a page is one block, which is copied through rows of kvtier's own: piece by piece where the pool says where
they are, else as the flat page that the pool makes and takes.

A page whose number is outside the pool, or that does not begin at a multiple of the page size, is never touched.
"""

import ctypes
import logging
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.engines.sglang.settings import MAX_BATCH_PAGES
from kvtier.errors import KVCacheLayoutError

logger = logging.getLogger(__name__)

MAX_PIECES_IN_PLACE = 2
"""Pieces of a page that are blocks of their own. Keys and values are two; the pieces of each layer would be many small
blocks, and one copy costs less than their calls."""


class HostPool(Protocol):
    """What of a host pool of SGLang's is used; ``kv_buffer`` and ``get_page_buffer_meta`` may be missing."""

    page_size: int
    size: int

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Return address and size in bytes of each piece of the pages."""

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Return a copy of a page, one-dimensional."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return a page of zeros, one-dimensional."""

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Write a page."""


SLOT_TYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
"""The types that numbers of slots may have."""

Item = int | torch.Tensor
"""A page: its first slot in the pool, or a tensor with its bytes."""

Row = npt.NDArray[np.int8]
"""The bytes of one page, shape (page_bytes,)."""


class Pages(ABC):
    """The pages of one host pool, as rows.

    Attributes:
        rows: shape (number of rows, row_bytes), format 'b', writable: the tier's ``primary_kv_view``.
        num_pieces: rows of a page, which are one block each.
        form: how bytes are ordered in a page, for the identity of its blocks.
    """

    rows: memoryview
    num_pieces: int
    form: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.rows.shape[1] if self.rows.shape else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.num_pieces * self.row_bytes

    @abstractmethod
    @contextmanager
    def lend(self, items: Sequence[Item], *, is_store: bool) -> Iterator[list[list[int]]]:
        """Lend rows for the first of some pages, one page at least; for a store the rows hold the pages' bytes.

        Args:
            items: the pages, checked.
            is_store: whether the rows are read; otherwise they are written, and ``take`` follows.
        """

    @abstractmethod
    def take(self, item: Item, row: int) -> None:
        """Bring what a load has written into a page's rows, beginning with ``row``, to the page."""


class PagesInPlace(Pages):
    """Pages whose pieces are rows of the pool's own memory.

    Args:
        buffer: the pool's memory, contiguous.
        page_size: slots of a page.
        first_rows: of each piece the row that it has in the first page.
        row_bytes: bytes of a piece.
    """

    def __init__(
        self, buffer: torch.Tensor, page_size: int, first_rows: Sequence[int], row_bytes: int
    ) -> None:
        flat = buffer.view(torch.uint8).reshape(-1).numpy()
        num_rows = flat.nbytes // row_bytes
        self.rows = flat[: num_rows * row_bytes].view(np.int8).reshape(num_rows, row_bytes).data
        self.num_pieces = len(first_rows)
        self.form = f"{len(first_rows)} pieces in place"
        self._page_size = page_size
        self._first_rows = first_rows

    @contextmanager
    def lend(self, items: Sequence[Item], *, is_store: bool) -> Iterator[list[list[int]]]:
        size = self._page_size
        yield [
            [first + item // size for first in self._first_rows] for item in items if isinstance(item, int)
        ]

    def take(self, item: Item, row: int) -> None:
        pass  # it is there


class StagedPages(Pages):
    """Pages that are copied through rows of kvtier's own, half of them for stores and half for loads.

    Mutable are the rows. A lock for each half guards it: one call uses it at a time.

    Args:
        page_bytes: bytes of a page.
        staging_bytes: memory for the rows; each half has room for one page at least.
        form: how bytes are ordered in a page.
        read: copies a page into a row.
        write: copies a row into a page.
        num_pieces: rows of a page.
    """

    def __init__(
        self,
        page_bytes: int,
        staging_bytes: int,
        form: str,
        read: Callable[[Item, Row], None],
        write: Callable[[Item, Row], None],
        num_pieces: int = 1,
    ) -> None:
        self._half = half = max(1, min(MAX_BATCH_PAGES, staging_bytes // (2 * page_bytes)))
        flat = np.frombuffer(mmap.mmap(-1, 2 * half * page_bytes), np.int8)
        self._pages = flat.reshape(2 * half, page_bytes)
        self.rows = flat.reshape(2 * half * num_pieces, page_bytes // num_pieces).data
        self.num_pieces = num_pieces
        self.form = form
        self._read = read
        self._write = write
        self._locks = {True: threading.Lock(), False: threading.Lock()}

    @contextmanager
    def lend(self, items: Sequence[Item], *, is_store: bool) -> Iterator[list[list[int]]]:
        begin = 0 if is_store else self._half
        num = self.num_pieces
        with self._locks[is_store]:
            pages = range(begin, begin + min(len(items), self._half))
            if is_store:
                for item, page in zip(items, pages, strict=False):
                    self._read(item, self._pages[page])
            yield [list(range(page * num, (page + 1) * num)) for page in pages]

    def take(self, item: Item, row: int) -> None:
        self._write(item, self._pages[row // self.num_pieces])


def open_pages(pool: HostPool, staging_bytes: int, *, has_values: bool) -> Pages:
    """Return the pages of a host pool in the way that copies least.

    Args:
        pool: the pool.
        staging_bytes: memory for rows where pages must be copied.
        has_values: whether pages come as tensors too, so that they are stored in the form that these have.

    Raises:
        KVCacheLayoutError: the pool offers none of the ways.
    """
    if has_values:
        return whole_pages(pool, staging_bytes)
    try:
        first, last = _pieces_of(pool, 0), _pieces_of(pool, pool.size // pool.page_size - 1)
    except Exception as error:  # noqa: BLE001 # foreign: each pool refuses its layouts with another error
        logger.info("pages of %s are copied whole: %s", type(pool).__name__, error)
        return whole_pages(pool, staging_bytes)
    in_place = _in_place(pool, first, last)
    return in_place or _gathered_pages(pool, [size for _, size in first], staging_bytes)


def open_values(pages: Pages, staging_bytes: int) -> Pages | None:
    """Return rows for tensors with the bytes of such pages, None where a page's bytes have another order there.

    Args:
        pages: of the pool.
        staging_bytes: memory for the rows.
    """
    if not isinstance(pages, PagesInPlace):
        return None
    return StagedPages(
        pages.page_bytes, staging_bytes, pages.form, _read_value, _write_value, pages.num_pieces
    )


def first_slots(pool: HostPool, indices: object, num_pages: int) -> list[int | None]:
    """Return the first slot of each page that SGLang names; None for a page that the pool does not have.

    Args:
        pool: the pool that they are about.
        indices: one-dimensional tensor of slots, ``page_size`` for each page; all are None where it is anything else.
        num_pages: how many pages are expected.
    """
    size = pool.page_size
    if not isinstance(indices, torch.Tensor) or indices.dtype not in SLOT_TYPES or not is_plain(indices):
        return [None] * num_pages
    if indices.dim() != 1 or indices.numel() != num_pages * size:
        return [None] * num_pages
    slots = indices[::size].tolist()
    limit = pool.size - size
    return [slot if 0 <= slot <= limit and slot % size == 0 else None for slot in slots]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its numbers in memory, one beside the other: sparse and meta ones have not. Pure."""
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def whole_pages(pool: HostPool, staging_bytes: int) -> StagedPages:
    """Return pages that the pool makes and takes as a whole.

    Raises:
        KVCacheLayoutError: it does not.
    """
    try:
        empty = pool.get_dummy_flat_data_page()
    except Exception as error:  # foreign: as above
        name, layout = type(pool).__name__, getattr(pool, "layout", "?")
        raise KVCacheLayoutError(f"{name} of layout {layout} has no pages to store: {error}") from error

    def read(item: Item, row: Row) -> None:
        _read_value(pool.get_data_page(item, flat=True) if isinstance(item, int) else item, row)

    def write(item: Item, row: Row) -> None:
        page = torch.empty(empty.shape, dtype=empty.dtype) if isinstance(item, int) else item
        _write_value(page, row)
        if isinstance(item, int):
            pool.set_from_flat_data_page(item, page)

    return StagedPages(empty.nbytes, staging_bytes, "whole pages", read, write)


Piece = tuple[int, int]
"""Address and size in bytes."""


def _pieces_of(pool: HostPool, page: int) -> list[Piece]:
    size = pool.page_size
    addresses, sizes = pool.get_page_buffer_meta(torch.arange(page * size, (page + 1) * size))
    if not addresses or len(addresses) != len(sizes) or min(sizes) < 1:
        raise KVCacheLayoutError(f"{type(pool).__name__} names {len(addresses)} pieces of {len(sizes)} sizes")
    return list(zip(addresses, sizes, strict=True))


def _in_place(pool: HostPool, first: list[Piece], last: list[Piece]) -> PagesInPlace | None:
    """Return pages in the pool's memory; None unless each piece lies at the same distance for each page."""
    buffer = getattr(pool, "kv_buffer", None)
    sizes = {size for _, size in (*first, *last)}
    if not isinstance(buffer, torch.Tensor) or not buffer.is_contiguous() or buffer.device.type != "cpu":
        return None
    if len(sizes) != 1 or len(first) > MAX_PIECES_IN_PLACE:
        return None
    (row_bytes,) = sizes
    num_pages = pool.size // pool.page_size
    rows = []
    for (begin, _), (end, _) in zip(first, last, strict=True):
        row, rest = divmod(begin - buffer.data_ptr(), row_bytes)
        is_inside = row >= 0 and (row + num_pages) * row_bytes <= buffer.nbytes
        if rest or not is_inside or end - begin != (num_pages - 1) * row_bytes:
            return None
        rows.append(row)
    return PagesInPlace(buffer, pool.page_size, rows, row_bytes)


def _gathered_pages(pool: HostPool, sizes: list[int], staging_bytes: int) -> StagedPages:
    """Return pages that are gathered from their pieces and scattered to them."""

    def move(item: Item, row: Row, *, is_read: bool) -> None:
        assert isinstance(item, int), "only whole pages come as tensors"
        pieces = _pieces_of(pool, item // pool.page_size)
        if [size for _, size in pieces] != sizes:
            raise KVCacheLayoutError(f"{type(pool).__name__}: the pieces of slot {item} have other sizes")
        place = row.ctypes.data
        for address, size in pieces:
            ctypes.memmove(*((place, address) if is_read else (address, place)), size)
            place += size

    form = f"pieces of {'+'.join(map(str, sizes))} bytes"
    read, write = partial(move, is_read=True), partial(move, is_read=False)
    return StagedPages(sum(sizes), staging_bytes, form, read, write)


def _read_value(item: Item, row: Row) -> None:
    assert isinstance(item, torch.Tensor), "a slot has no bytes of its own"
    row[:] = _bytes_of(item.contiguous())


def _write_value(item: Item, row: Row) -> None:
    assert isinstance(item, torch.Tensor), "as above"
    _bytes_of(item)[:] = row


def _bytes_of(tensor: torch.Tensor) -> Row:
    array: Row = tensor.view(torch.uint8).reshape(-1).numpy().view(np.int8)
    return array
