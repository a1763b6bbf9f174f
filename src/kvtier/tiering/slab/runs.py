"""Neighbouring slots, to be moved with one call. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier.tiering.slab.era import Hold


class Move(NamedTuple):
    """A block's two places.

    Attributes:
        hold: its slot in the file.
        row: its bytes in the primary tier.
    """

    hold: Hold
    row: memoryview


def join_runs(moves: Iterable[Move], max_blocks: int) -> list[Sequence[Move]]:
    """Return the moves ordered by slot, cut wherever a slot does not follow the one before. Pure.

    Args:
        moves: of slots that differ.
        max_blocks: moves in a run.
    """
    runs: list[list[Move]] = []
    for move in sorted(moves, key=lambda move: move.hold.slot):
        if runs and len(runs[-1]) < max_blocks and runs[-1][-1].hold.slot + 1 == move.hold.slot:
            runs[-1].append(move)
        else:
            runs.append([move])
    return list(runs)
