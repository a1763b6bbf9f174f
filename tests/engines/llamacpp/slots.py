"""Slot files out of thin air: every layout, with bytes that say which token they belong to."""

from collections.abc import Sequence

import numpy as np

from kvtier.engines.llamacpp.slot_file import RowLayout, Rows, SlotFile, SlotLayout, State, Tensor

F16, F32, Q8_0 = 1, 0, 8

WINDOW_TOKENS = 20


def row_layout(
    *,
    num_layers: int = 2,
    kind: int = F16,
    row_bytes: int = 32,
    num_streams: int = 1,
    cell_bytes: int = 12,
    is_transposed: bool = False,
    has_values: bool = True,
) -> RowLayout:
    keys = (Tensor(kind, row_bytes),) * num_layers
    values = (Tensor(kind, row_bytes, 2 if is_transposed else 0),) * num_layers if has_values else ()
    return RowLayout(num_streams, cell_bytes, 0, 0, is_transposed, keys, values)


LAYOUTS = {
    "llama": SlotLayout(row_layout()),
    "q8_0": SlotLayout(row_layout(kind=Q8_0, row_bytes=34)),
    "streams": SlotLayout(row_layout(num_streams=4)),
    "transposed": SlotLayout(row_layout(is_transposed=True)),
    "mrope": SlotLayout(row_layout(cell_bytes=24)),
    "mla": SlotLayout(row_layout(has_values=False)),
    "windows": SlotLayout(row_layout(num_layers=1), row_layout(num_layers=3)),
    "windows of streams": SlotLayout(
        row_layout(num_streams=2), row_layout(num_layers=3, num_streams=2, is_transposed=True)
    ),
    "hybrid": SlotLayout(row_layout(), None, ((6, 0), (F32, 40), (F32, 24))),
    "hybrid with windows": SlotLayout(row_layout(), row_layout(num_layers=1), ((6, 0), (F32, 40))),
    "mamba": SlotLayout(None, None, ((2, 0), (F32, 40), (F32, 24), (F32, 40), (F32, 24))),
}


def make_rows(layout: RowLayout, tokens: Sequence[int], start: int, stop: int) -> Rows:
    """Return rows whose bytes follow from the tokens up to theirs, as a model's do."""
    positions = np.arange(start, stop, dtype="<i4")
    cells = np.zeros((stop - start, layout.cell_bytes), np.uint8)
    cells[:, :4] = positions[:, None].view(np.uint8).reshape(-1, 4)
    cells[:, 4] = 1
    sums = np.cumsum(np.asarray(tokens, np.int64) * 31 + 7)[start:stop]
    parts = [cells]
    for index, width in enumerate(layout.widths[1:]):
        parts.append(((sums[:, None] + np.arange(width)[None, :] * (index + 3)) % 251).astype(np.uint8))
    return Rows(layout, tuple(parts))


def make_state(layout: SlotLayout, tokens: Sequence[int], num_tokens: int) -> State:
    window = None
    if layout.window is not None:
        window = make_rows(layout.window, tokens, max(0, num_tokens - WINDOW_TOKENS), num_tokens)
    num_bytes = sum(size for _, size in layout.recurrent[1:])
    seed = sum(tokens[:num_tokens]) * 31 + num_tokens
    return State(num_tokens, window, bytes((seed + i) % 251 for i in range(num_bytes)))


def make_slot(layout: SlotLayout, tokens: Sequence[int], checkpoints: Sequence[int] = ()) -> SlotFile:
    attention = None
    if layout.attention is not None:
        attention = make_rows(layout.attention, tokens, 0, len(tokens))
    states = tuple(make_state(layout, tokens, one) for one in checkpoints)
    return SlotFile(layout, tuple(tokens), attention, make_state(layout, tokens, len(tokens)), states)


def make_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    return [3 + (i * i * 7 + i + seed * 13) % 200 for i in range(num_tokens)]
