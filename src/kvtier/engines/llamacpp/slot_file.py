"""Read and write llama.cpp's slot files (``POST /slots/ID?action=save``), version 4, to the last byte.

A slot file holds the tokens of one conversation, then a section for each cache of the model::

    attention            one row per token and layer for K, then for V; MLA models store no V
    attention, window    sliding windows: the second section has the rows of the last tokens only
    recurrent            one state, which is valid after the last token only
    attention[, window], recurrent     hybrid models

Builds after 11434 add an appendix without a new version number: checkpoints, which are the window and the recurrent
state as they were after earlier tokens. The format names neither the model nor the sections, so the reader tries each
known order. A file must fit exactly one of them up to its last byte; anything else raises SlotFormatError.

Source: llama.cpp, ``llama_kv_cache::state_write`` and ``llama_memory_recurrent::state_write``, builds 11434 and 11549.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import SlotFormatError

MAGIC = 0x67677371
VERSION = 4
TOKEN_LIST_MARK = -1
TOKEN_LIST_VERSION = 1
APPENDIX_MAGIC = 0x504B4353
APPENDIX_VERSION = 1
CHECKPOINT_MAGIC = 0xAF143CD8

UNIT_BYTES = {0: 4, 1: 2, 2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 20: 18, 30: 2}
"""ggml type -> bytes of its smallest unit: f32, f16, q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, bf16."""

CELL_BYTES = (12, 24)
"""Position, number of sequences and sequence of a token; 24 with the positions in a picture that M-RoPE models have."""

MAX_LAYERS = 4096
MAX_STREAMS = 256

Bytes = npt.NDArray[np.uint8]


class Tensor(NamedTuple):
    """K or V of one layer.

    Attributes:
        kind: its ggml type.
        row_bytes: bytes of one token.
        value_bytes: bytes of one value where the file has the tensor by value; 0: by token.
    """

    kind: int
    row_bytes: int
    value_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What two attention sections must have in common for their rows to be interchangeable."""

    num_streams: int
    cell_bytes: int
    rotation_k: int
    rotation_v: int
    is_v_transposed: bool
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of one token in its cell and in each tensor."""
        return (self.cell_bytes, *(tensor.row_bytes for tensor in self.keys + self.values))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return sum(self.widths)


class SlotLayout(NamedTuple):
    """The sections of a model's slot files.

    Attributes:
        attention: rows of every token; None for a model that has only recurrent states.
        window: rows of the last tokens.
        recurrent: ggml type and bytes of each tensor of the state.
    """

    attention: RowLayout | None = None
    window: RowLayout | None = None
    recurrent: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of consecutive tokens.

    Attributes:
        layout: of the section.
        parts: the cells and each tensor, shape (num_tokens, width) by ``layout.widths``.
    """

    layout: RowLayout
    parts: tuple[Bytes, ...]

    def __len__(self) -> int:
        return len(self.parts[0])

    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """The position of each token."""
        return _numbers(self.parts[0])[:, 0]

    def cut(self, start: int, stop: int) -> "Rows":
        """Return a part of the rows."""
        return Rows(self.layout, tuple(part[start:stop] for part in self.parts))

    def pack(self) -> bytes:
        """Return the rows as one byte string."""
        return b"".join(part.tobytes() for part in self.parts)


def unpack_rows(layout: RowLayout, payload: bytes | memoryview, first_token: int) -> Rows:
    """Return what ``Rows.pack`` wrote.

    Raises:
        SlotFormatError: these are not the rows of tokens from ``first_token`` on.
    """
    num_tokens, rest = divmod(len(payload), layout.token_bytes)
    if rest:
        raise SlotFormatError(f"{len(payload)} bytes are no whole number of rows of {layout.token_bytes}")
    data, offset, parts = np.frombuffer(payload, np.uint8), 0, []
    for width in layout.widths:
        parts.append(data[offset : offset + num_tokens * width].reshape(num_tokens, width))
        offset += num_tokens * width
    rows = Rows(layout, tuple(parts))
    _require_positions(rows, first_token)
    return rows


@dataclass(frozen=True, slots=True)
class State:
    """What is valid after ``num_tokens`` tokens only.

    Attributes:
        num_tokens: the tokens.
        window: rows of the last of them; None where the model has no windows.
        recurrent: the tensors of the recurrent state, one behind the other.
    """

    num_tokens: int
    window: Rows | None = None
    recurrent: bytes = b""


@dataclass(frozen=True, slots=True)
class SlotFile:
    """The content of a slot file.

    Attributes:
        layout: its sections.
        tokens: the conversation.
        attention: a row for each token; None for a model that has only recurrent states.
        state: after the last token.
        checkpoints: after earlier tokens.
    """

    layout: SlotLayout
    tokens: tuple[int, ...]
    attention: Rows | None
    state: State
    checkpoints: tuple[State, ...] = ()


def read_slot_file(data: bytes | bytearray | memoryview, layout: SlotLayout | None = None) -> SlotFile:
    """Parse a slot file.

    Args:
        data: the whole file.
        layout: what it must have; None takes any.

    Raises:
        SlotFormatError: it is damaged, has pictures or sound, or a layout that is not known or not ``layout``.
    """
    reader = _Reader(memoryview(data))
    tokens = _read_tokens(reader)
    found = []
    for attention, state, of_state, end in _read_sections(reader.at(reader.offset), len(tokens)):
        own = SlotLayout(attention.layout if attention else None, *of_state)
        try:
            found.append(SlotFile(own, tokens, attention, state, _read_appendix(reader.at(end), own)))
        except SlotFormatError:
            continue
    if len(found) != 1:
        raise SlotFormatError(f"{len(found)} known layouts fit the file, and it must be one")
    if layout is not None and found[0].layout != layout:
        raise SlotFormatError("its layout is not that of the self-test: another cache type, model or build")
    return found[0]


def write_slot_file(slot: SlotFile) -> bytearray:
    """Return the bytes of a slot file."""
    tokens = slot.tokens
    words = (TOKEN_LIST_MARK, TOKEN_LIST_VERSION, len(tokens), *tokens, 0)
    out = bytearray(struct.pack(f"<III{len(words)}i", MAGIC, VERSION, len(words), *words))
    if slot.attention is not None:
        _write_rows(out, slot.attention)
    _write_state(out, slot.layout, slot.state)
    if slot.checkpoints:
        out += struct.pack("<III", APPENDIX_MAGIC, APPENDIX_VERSION, len(slot.checkpoints))
    for state in slot.checkpoints:
        content = bytearray(struct.pack("<Ii", CHECKPOINT_MAGIC, 0))
        _write_state(content, slot.layout, state)
        # The server writes position 0 as the first that a window checkpoint serves, and the last one for a state.
        pos_max = state.num_tokens - 1
        pos_min = 0 if state.window is not None else pos_max
        out += struct.pack("<qiiQ", state.num_tokens, pos_min, pos_max, len(content))
        out += content + struct.pack("<QQ", 0, 0)
    return out


def join_rows(layout: RowLayout, runs: Sequence[Rows]) -> Rows:
    """Return runs of rows, one behind the other, as one. Pure."""
    columns = zip(*(run.parts for run in runs), strict=True)
    return Rows(layout, tuple(np.concatenate(column) for column in columns))


class _Reader:
    """A position in the bytes of a file."""

    def __init__(self, data: memoryview, offset: int = 0) -> None:
        self.data, self.offset = data, offset

    def at(self, offset: int) -> "_Reader":
        return _Reader(self.data, offset)

    def take(self, fields: str) -> tuple[int, ...]:
        size = struct.calcsize("<" + fields)
        if self.offset + size > len(self.data):
            raise SlotFormatError("the file ends within a header")
        values = struct.unpack_from("<" + fields, self.data, self.offset)
        self.offset += size
        return values

    def array(self, num_rows: int, row_bytes: int) -> Bytes:
        size = num_rows * row_bytes
        if self.offset + size > len(self.data):
            raise SlotFormatError("the file ends within its rows")
        found = np.frombuffer(self.data, np.uint8, size, self.offset).reshape(num_rows, row_bytes)
        self.offset += size
        return found


_StateLayout = tuple[RowLayout | None, tuple[tuple[int, int], ...]]
"""The layouts of a state's window and of its recurrent part."""


def _read_tokens(reader: _Reader) -> tuple[int, ...]:
    magic, version, num_words = reader.take("III")
    if (magic, version) != (MAGIC, VERSION):
        raise SlotFormatError(f"magic {magic:#x} version {version}, expected {MAGIC:#x} version {VERSION}")
    if num_words < 4 or num_words * 4 > len(reader.data):
        raise SlotFormatError(f"a list of tokens with {num_words} words")
    words = reader.take(f"{num_words}i")
    if words[:2] != (TOKEN_LIST_MARK, TOKEN_LIST_VERSION) or words[2] + 4 != num_words or words[-1] != 0:
        raise SlotFormatError("a list of tokens of another version, or with pictures or sound")
    tokens = words[3:-1]
    if not tokens or min(tokens) < 0:
        raise SlotFormatError("no tokens, or tokens that are no text")
    return tokens


def _read_sections(
    reader: _Reader, num_tokens: int
) -> Iterator[tuple[Rows | None, State, _StateLayout, int]]:
    """Yield rows, state and end for each known order of sections that fits."""
    for recurrent, content, end in _read_recurrent(reader.at(reader.offset), num_tokens):
        yield None, State(num_tokens, None, content), (None, recurrent), end
    for rows, offset in _read_rows(reader):
        if np.array_equal(rows.positions, np.arange(num_tokens)):
            yield rows, State(num_tokens), (None, ()), offset
            for state, layout, end in _read_states(reader.at(offset), num_tokens):
                yield rows, state, layout, end


def _read_states(reader: _Reader, num_tokens: int) -> Iterator[tuple[State, _StateLayout, int]]:
    """Yield each way in which a state of ``num_tokens`` tokens can begin here."""
    for recurrent, content, end in _read_recurrent(reader.at(reader.offset), num_tokens):
        yield State(num_tokens, None, content), (None, recurrent), end
    for window, offset in _read_rows(reader):
        if np.array_equal(window.positions, np.arange(num_tokens - len(window), num_tokens)):
            yield State(num_tokens, window), (window.layout, ()), offset
            for recurrent, content, end in _read_recurrent(reader.at(offset), num_tokens):
                yield State(num_tokens, window, content), (window.layout, recurrent), end


def _read_recurrent(
    reader: _Reader, num_tokens: int
) -> Iterator[tuple[tuple[tuple[int, int], ...], bytes, int]]:
    """Yield type and size of the tensors, their bytes, and the end of a state that stands at the last token."""
    tensors, content = [], []
    try:
        num_cells, position, num_sequences, is_transposed, num_layers = reader.take("IiIII")
        if (num_cells, position, num_sequences, is_transposed) != (1, num_tokens - 1, 0, 0):
            return
        # Layers without a state are left out, so the last tensor is the one before something else.
        for _ in range(2 * min(num_layers, MAX_LAYERS)):
            before = reader.offset
            if before == len(reader.data):
                break
            kind, row_bytes = reader.take("iQ")
            if kind not in UNIT_BYTES:
                reader.offset = before
                break
            content.append(reader.array(1, row_bytes).tobytes())
            tensors.append((kind, row_bytes))
    except SlotFormatError:
        return
    if tensors:
        # The number of layers comes first, as it cannot be told from the tensors.
        yield ((num_layers, 0), *tensors), b"".join(content), reader.offset


def _read_appendix(reader: _Reader, layout: SlotLayout) -> tuple[State, ...]:
    """Read the checkpoints, which must use the file up to its last byte."""
    if reader.offset == len(reader.data):
        return ()
    magic, version, count = reader.take("III")
    if (magic, version) != (APPENDIX_MAGIC, APPENDIX_VERSION):
        raise SlotFormatError(f"unknown data after the sections: {magic:#x}, version {version}")
    states = []
    for _ in range(count):
        num_tokens, _, _, num_bytes = reader.take("qiiQ")
        content = memoryview(reader.array(1, num_bytes)[0])
        if reader.take("Q") != (0,) or reader.take("Q") != (0,):
            raise SlotFormatError("checkpoints of a draft model")
        states.append(_read_checkpoint(content, num_tokens, layout))
    if reader.offset != len(reader.data):
        raise SlotFormatError(f"{len(reader.data) - reader.offset} bytes after the checkpoints")
    return tuple(states)


def _read_checkpoint(content: memoryview, num_tokens: int, layout: SlotLayout) -> State:
    reader = _Reader(content)
    if not 0 < num_tokens < 2**31 or reader.take("Ii")[0] != CHECKPOINT_MAGIC:
        raise SlotFormatError(f"a checkpoint of {num_tokens} tokens of another version")
    for state, of_state, end in _read_states(reader, num_tokens):
        if end == len(content) and of_state == layout[1:]:
            return state
    raise SlotFormatError(f"the checkpoint of {num_tokens} tokens has another layout than the file")


def _read_rows(reader: _Reader) -> Iterator[tuple[Rows, int]]:
    """Yield each way in which a section of rows can begin here, with its end."""
    for cell_bytes in CELL_BYTES:
        for has_values in (True, False):
            own = reader.at(reader.offset)
            try:
                yield _read_section(own, cell_bytes, has_values=has_values), own.offset
            except SlotFormatError:
                continue


def _read_section(reader: _Reader, cell_bytes: int, *, has_values: bool) -> Rows:
    (num_streams,) = reader.take("I")
    if not 1 <= num_streams <= MAX_STREAMS:
        raise SlotFormatError(f"{num_streams} streams")
    found: Rows | None = None
    for _ in range(num_streams):
        (num_cells,) = reader.take("I")
        if num_cells and found is not None:
            raise SlotFormatError("cells in two streams")
        if num_cells:
            found = _read_stream(reader, num_streams, num_cells, cell_bytes, has_values=has_values)
    if found is None:
        raise SlotFormatError("no cells")
    return found


def _read_stream(
    reader: _Reader, num_streams: int, num_cells: int, cell_bytes: int, *, has_values: bool
) -> Rows:
    cells = reader.array(num_cells, cell_bytes)
    if (_numbers(cells)[:, 1] != 1).any():
        raise SlotFormatError("a cell of several sequences")
    transposed, num_layers, rotation_k, rotation_v = reader.take("IIII")
    if transposed > 1 or not 0 < num_layers <= MAX_LAYERS:
        raise SlotFormatError(f"order of V {transposed}, {num_layers} layers")
    parts = [cells]
    read_value = _read_transposed if transposed else _read_tensor
    keys = [_read_tensor(reader, num_cells, parts) for _ in range(num_layers)]
    values = [read_value(reader, num_cells, parts) for _ in range(num_layers if has_values else 0)]
    layout = RowLayout(
        num_streams, cell_bytes, rotation_k, rotation_v, bool(transposed), tuple(keys), tuple(values)
    )
    order = np.argsort(_numbers(cells)[:, 0], kind="stable")
    if not np.array_equal(order, np.arange(num_cells)):
        parts = [part[order] for part in parts]
    return Rows(layout, tuple(parts))


def _read_tensor(reader: _Reader, num_cells: int, parts: list[Bytes]) -> Tensor:
    tensor = _checked(Tensor(*reader.take("iQ")))
    parts.append(reader.array(num_cells, tensor.row_bytes))
    return tensor


def _read_transposed(reader: _Reader, num_cells: int, parts: list[Bytes]) -> Tensor:
    kind, value_bytes, width = reader.take("iII")
    tensor = _checked(Tensor(kind, value_bytes * width, value_bytes))
    by_value = reader.array(width, num_cells * value_bytes).reshape(width, num_cells, value_bytes)
    parts.append(by_value.transpose(1, 0, 2).reshape(num_cells, -1))
    return tensor


def _checked(tensor: Tensor) -> Tensor:
    unit = UNIT_BYTES.get(tensor.kind)
    if unit is None or tensor.row_bytes <= 0 or tensor.row_bytes % unit:
        raise SlotFormatError(f"rows of {tensor.row_bytes} bytes of ggml type {tensor.kind}")
    return tensor


def _require_positions(rows: Rows, first_token: int) -> None:
    header = _numbers(rows.parts[0])
    expected = np.arange(first_token, first_token + len(rows))
    if not np.array_equal(header[:, 0], expected) or (header[:, 1] != 1).any():
        raise SlotFormatError(f"rows of other tokens than {len(rows)} from {first_token} on")


def _numbers(cells: Bytes) -> npt.NDArray[np.int32]:
    """Return position and number of sequences of each cell."""
    found: npt.NDArray[np.int32] = np.ascontiguousarray(cells[:, :8]).view("<i4")
    return found


def _write_rows(out: bytearray, rows: Rows) -> None:
    layout, num_tokens = rows.layout, len(rows)
    out += struct.pack("<II", layout.num_streams, num_tokens)
    out += rows.parts[0].tobytes()
    out += struct.pack(
        "<IIII", layout.is_v_transposed, len(layout.keys), layout.rotation_k, layout.rotation_v
    )
    for tensor, part in zip(layout.keys + layout.values, rows.parts[1:], strict=True):
        if tensor.value_bytes:
            width = tensor.row_bytes // tensor.value_bytes
            out += struct.pack("<iII", tensor.kind, tensor.value_bytes, width)
            out += part.reshape(num_tokens, width, tensor.value_bytes).transpose(1, 0, 2).tobytes()
        else:
            out += struct.pack("<iQ", tensor.kind, tensor.row_bytes)
            out += part.tobytes()
    out += struct.pack("<I", 0) * (layout.num_streams - 1)


def _write_state(out: bytearray, layout: SlotLayout, state: State) -> None:
    if state.window is not None:
        _write_rows(out, state.window)
    if not layout.recurrent:
        return
    (num_layers, _), *tensors = layout.recurrent
    out += struct.pack("<IiIII", 1, state.num_tokens - 1, 0, 0, num_layers)
    offset = 0
    for kind, num_bytes in tensors:
        out += struct.pack("<iQ", kind, num_bytes) + state.recurrent[offset : offset + num_bytes]
        offset += num_bytes
