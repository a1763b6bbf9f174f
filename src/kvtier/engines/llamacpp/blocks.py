"""Which records a conversation is stored as, and how a slot file is put together again from them.

A record is named by the tokens before and in it, so conversations that begin alike share records. Its size follows from
its name and the model's layout alone, and so two servers that store the same record may even mix its pieces::

    ROWS n     rows of the block that ends at token n, of every layer that attends to all tokens
    WINDOW n   the same of the layers with sliding windows; known only where a slot file or a checkpoint had them
    END n      what lets a prefix end at token n between two blocks: the rows behind the last block, and the
               recurrent state, which cannot be cut
    HEAD n     the first rows of the window of a prefix of n tokens, where nothing holds the whole block

A prefix can end at token n when the rows of n tokens, its window and its state are held.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np

from kvtier.engines.llamacpp.slot_file import (
    Rows,
    SlotFile,
    SlotLayout,
    State,
    join_rows,
    unpack_rows,
)


class RecordKind(Enum):
    """What a record holds; the value is the index of its KV group."""

    ROWS = 0
    WINDOW = 1
    END = 2
    HEAD = 3


class Record(NamedTuple):
    """One record of a conversation.

    Attributes:
        kind: what it holds.
        num_tokens: the end of what it holds; for HEAD the end of the prefix whose window it begins.
    """

    kind: RecordKind
    num_tokens: int


class TokenNames:
    """The names of a conversation's records. Each digest covers every token before it.

    Args:
        tokens: the conversation.
        block_tokens: tokens of a block.
    """

    def __init__(self, tokens: Sequence[int], block_tokens: int) -> None:
        self._data = np.asarray(tokens, "<i4").tobytes()
        self._block_bytes = 4 * block_tokens
        self._block_tokens = block_tokens
        self._chain = [_digest(b"kvtier llama.cpp", struct.pack("<I", block_tokens))]

    def name(self, record: Record) -> bytes:
        """Return the name of a record."""
        return _digest(self._prefix(record.num_tokens), bytes((record.kind.value,)))

    def _prefix(self, num_tokens: int) -> bytes:
        """Return a digest of the first tokens."""
        num_blocks, rest = divmod(num_tokens, self._block_tokens)
        size = self._block_bytes
        while len(self._chain) <= num_blocks:
            start = (len(self._chain) - 1) * size
            self._chain.append(_digest(self._chain[-1], self._data[start : start + size]))
        if not rest:
            return self._chain[num_blocks]
        start = num_blocks * size
        return _digest(self._chain[num_blocks], self._data[start : start + 4 * rest])


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How the conversations of one model are cut.

    Attributes:
        layout: of its slot files.
        block_tokens: tokens of a block.
        window_tokens: tokens of a sliding window; None where the model has none.
    """

    layout: SlotLayout
    block_tokens: int
    window_tokens: int | None = None

    @property
    def state_bytes(self) -> int:
        """Bytes of a recurrent state; 0 where the model has none."""
        return sum(num_bytes for _, num_bytes in self.layout.recurrent[1:])

    @property
    def is_cuttable(self) -> bool:
        """Whether a prefix may end at any token."""
        return self.layout.window is None and not self.layout.recurrent

    def has_end_record(self, num_tokens: int) -> bool:
        """Return whether a prefix of so many tokens needs a record of its end."""
        return bool(self.state_bytes or num_tokens % self.block_tokens)

    def window_start(self, num_tokens: int) -> int:
        """Return the first token whose window rows a prefix of so many tokens needs."""
        return num_tokens if self.window_tokens is None else max(0, num_tokens - self.window_tokens)

    def window_blocks(self, num_tokens: int) -> list[Record]:
        """Return the blocks of window rows behind which a prefix of so many tokens goes on."""
        size, start = self.block_tokens, self.window_start(num_tokens)
        last = num_tokens // size
        return [Record(RecordKind.WINDOW, (index + 1) * size) for index in range(start // size, last)]

    def head_span(self, num_tokens: int) -> tuple[int, int]:
        """Return from and to which token the window of a prefix is a part of its first block; empty: it is whole."""
        size, start = self.block_tokens, self.window_start(num_tokens)
        is_part = start % size and start // size < num_tokens // size
        return (start, (start // size + 1) * size) if is_part else (start, start)

    def record_bytes(self, record: Record) -> int:
        """Return the size of a record; it follows from its name."""
        attention, window = self.layout.attention, self.layout.window
        row_bytes = attention.token_bytes if attention else 0
        window_bytes = window.token_bytes if window else 0
        num_tokens = record.num_tokens
        if record.kind is RecordKind.ROWS:
            return self.block_tokens * row_bytes
        if record.kind is RecordKind.WINDOW:
            return self.block_tokens * window_bytes
        if record.kind is RecordKind.HEAD:
            start, stop = self.head_span(num_tokens)
            return (stop - start) * window_bytes
        num_tail = num_tokens % self.block_tokens
        num_window_tail = num_tokens - max(num_tokens - num_tail, self.window_start(num_tokens))
        return num_tail * row_bytes + num_window_tail * window_bytes + self.state_bytes

    def prefix_records(self, num_tokens: int) -> list[Record]:
        """Return the records of a prefix of so many tokens, with whole blocks of its window."""
        size, found = self.block_tokens, []
        if self.layout.attention is not None:
            found = [Record(RecordKind.ROWS, end) for end in range(size, num_tokens + 1, size)]
        found += self.window_blocks(num_tokens) if self.layout.window is not None else []
        return [*found, Record(RecordKind.END, num_tokens)] if self.has_end_record(num_tokens) else found


def cut_slot(form: BlockFormat, slot: SlotFile) -> Iterator[tuple[Record, Callable[[], bytes]]]:
    """Yield each record that a slot file has, with what makes its bytes.

    A HEAD follows the WINDOW record in place of which it stands, which may be held although this file lacks it.
    """
    size, attention = form.block_tokens, slot.attention
    if attention is not None:
        for end in range(size, len(slot.tokens) + 1, size):
            yield Record(RecordKind.ROWS, end), attention.cut(end - size, end).pack
    states = sorted((*slot.checkpoints, slot.state), key=lambda state: state.num_tokens)
    windows = [state for state in states if state.window is not None]
    for end in range(size, len(slot.tokens) + 1, size):
        rows = _find_window(windows, end - size, end)
        if rows is not None:
            yield Record(RecordKind.WINDOW, end), rows.pack
    for state in states:
        if form.has_end_record(state.num_tokens):
            yield Record(RecordKind.END, state.num_tokens), partial(_pack_end, form, attention, state)
        start, stop = form.head_span(state.num_tokens)
        if start < stop and state.window is not None:
            first = state.num_tokens - len(state.window)
            yield (
                Record(RecordKind.HEAD, state.num_tokens),
                state.window.cut(start - first, stop - first).pack,
            )


def assemble_slot(form: BlockFormat, tokens: Sequence[int], payloads: Mapping[Record, bytes]) -> SlotFile:
    """Return the slot file of a prefix.

    Args:
        form: how it was cut.
        tokens: the whole prefix.
        payloads: its records; HEAD may stand in place of the first WINDOW.

    Raises:
        SlotFormatError: a record holds other tokens than it should.
    """
    num_tokens, size = len(tokens), form.block_tokens
    tail = num_tokens - num_tokens % size
    end = memoryview(payloads.get(Record(RecordKind.END, num_tokens), b""))
    attention, window = form.layout.attention, form.layout.window
    rows: Rows | None = None
    if attention is not None:
        blocks = range(size, num_tokens + 1, size)
        runs = [unpack_rows(attention, payloads[Record(RecordKind.ROWS, one)], one - size) for one in blocks]
        tail_bytes = (num_tokens - tail) * attention.token_bytes
        rows = join_rows(attention, [*runs, unpack_rows(attention, end[:tail_bytes], tail)])
        end = end[tail_bytes:]
    window_rows: Rows | None = None
    if window is not None:
        tail_start = max(tail, form.window_start(num_tokens))
        tail_bytes = (num_tokens - tail_start) * window.token_bytes
        runs = [
            *_unpack_window(form, num_tokens, payloads),
            unpack_rows(window, end[:tail_bytes], tail_start),
        ]
        window_rows = join_rows(window, runs)
        end = end[tail_bytes:]
    state = State(num_tokens, window_rows, bytes(end))
    # The window of the main state is one token too short for the server's own check, so it comes as a checkpoint too.
    checkpoints = (state,) if window_rows is not None else ()
    return SlotFile(form.layout, tuple(tokens), rows, state, checkpoints)


def _unpack_window(form: BlockFormat, num_tokens: int, payloads: Mapping[Record, bytes]) -> Iterator[Rows]:
    window, size = form.layout.window, form.block_tokens
    assert window is not None, "the caller has looked"
    start, (head, head_end) = form.window_start(num_tokens), form.head_span(num_tokens)
    blocks = form.window_blocks(num_tokens)
    head_payload = payloads.get(Record(RecordKind.HEAD, num_tokens))
    if head_payload is not None and blocks and blocks[0] not in payloads:
        yield unpack_rows(window, head_payload, head)
        blocks, start = blocks[1:], head_end
    for block in blocks:
        first = block.num_tokens - size
        yield unpack_rows(window, payloads[block], first).cut(max(0, start - first), size)


def _find_window(windows: Sequence[State], start: int, stop: int) -> Rows | None:
    """Return the window rows of some tokens out of the states that have them; None where one is missing. Pure."""
    runs: list[Rows] = []
    while start < stop:
        fitting = [
            state
            for state in windows
            if state.window is not None and state.num_tokens - len(state.window) <= start < state.num_tokens
        ]
        if not fitting:
            return None
        state = max(fitting, key=lambda state: state.num_tokens)
        assert state.window is not None, "the list has no others"
        first, end = state.num_tokens - len(state.window), min(stop, state.num_tokens)
        runs.append(state.window.cut(start - first, end - first))
        start = end
    return join_rows(runs[0].layout, runs)


def _pack_end(form: BlockFormat, attention: Rows | None, state: State) -> bytes:
    tail = state.num_tokens - state.num_tokens % form.block_tokens
    payload = b"" if attention is None else attention.cut(tail, state.num_tokens).pack()
    if state.window is not None:
        first = state.num_tokens - len(state.window)
        start = max(tail, form.window_start(state.num_tokens))
        payload += state.window.cut(start - first, len(state.window)).pack()
    return payload + state.recurrent


def _digest(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()
