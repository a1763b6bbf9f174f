"""What the front knows of the server's slots, and which one a request gets.

The choice is a function of the slots alone. What the front believes may be out of date: the server compares tokens for
itself, and before a save the front asks whose task the slot had last.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvtier.engines.llamacpp.server import ServerSlot

MIN_GAIN_TOKENS = 16
"""Tokens from which on a common beginning decides the slot, or a restore is worth it. Fewer are computed in the time of
a restore; more lose short system prompts."""


@dataclass(eq=False, slots=True)
class FrontSlot:
    """One slot of the server.

    Attributes:
        number: its id.
        tokens: what it holds, as far as known.
        is_busy: whether a request, a save or a restore has it.
        is_unsaved: whether it holds what is not stored.
        last_used_s: when its last request ended, on the clock.
        task: number of its last task; None: not known.
    """

    number: int
    tokens: Sequence[int] = ()
    is_busy: bool = False
    is_unsaved: bool = False
    last_used_s: float = 0.0
    task: int | None = None

    def forget(self) -> None:
        """Know nothing of what it holds, so that nothing of it is stored."""
        self.tokens, self.is_unsaved, self.task = (), False, None


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens are equal. Pure."""
    low, high = 0, min(len(one), len(other))
    one, other = tuple(one[:high]), tuple(other[:high])
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def choose_slot(slots: Iterable[FrontSlot], tokens: Sequence[int]) -> FrontSlot | None:
    """Return the free slot for a prompt; None where none is free. Pure.

    The one with the longest common beginning; else one whose conversation is stored, because a save may wait for a
    running batch; else the one that was used least recently.
    """
    free = [slot for slot in slots if not slot.is_busy]
    if not free:
        return None
    best = max(free, key=lambda slot: (common_prefix(slot.tokens, tokens), -slot.last_used_s))
    if common_prefix(best.tokens, tokens) >= MIN_GAIN_TOKENS:
        return best
    return min(free, key=lambda slot: (slot.is_unsaved, slot.last_used_s))


class SlotTable:
    """The slots, and requests that wait for one. Used from one event loop.

    Args:
        numbers: ids of the slots.
        clock: seconds, monotonic.

    Attributes:
        slots: by position.
    """

    def __init__(self, numbers: Iterable[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = [FrontSlot(number) for number in numbers]
        self._clock = clock
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def use(self, tokens: Sequence[int]) -> AsyncIterator[FrontSlot]:
        """Wait for a free slot and hold it."""
        async with self._changed:
            while (slot := choose_slot(self.slots, tokens)) is None:
                await self._changed.wait()
            slot.is_busy = True
        try:
            yield slot
        finally:
            slot.last_used_s = self._clock()
            await asyncio.shield(self._release(slot))

    @asynccontextmanager
    async def hold(self, slot: FrontSlot) -> AsyncIterator[None]:
        """Hold a free slot for a save; its last use stays what it was."""
        slot.is_busy = True
        try:
            yield
        finally:
            await asyncio.shield(self._release(slot))

    def idle(self, idle_s: float) -> list[FrontSlot]:
        """Return the free slots that hold something unsaved and were not used for so long."""
        end_s = self._clock() - idle_s
        return [
            slot for slot in self.slots if slot.is_unsaved and not slot.is_busy and slot.last_used_s <= end_s
        ]

    def forget_all(self) -> None:
        """Know nothing of what the slots hold."""
        for slot in self.slots:
            slot.forget()

    def compare(self, found: dict[int, ServerSlot]) -> bool:
        """Forget the slots that others have used or the server has emptied; return whether the server was restarted.

        Args:
            found: what the server says of them.
        """
        known = [slot.task for slot in self.slots if slot.task is not None]
        is_restarted = bool(known) and max((one.task for one in found.values()), default=-1) < max(known)
        for slot in self.slots:
            server_slot = found.get(slot.number)
            if slot.is_busy or (slot.task is None and not slot.tokens):
                continue
            if (
                server_slot is None
                or server_slot.task != slot.task
                or server_slot.num_tokens < len(slot.tokens)
                or is_restarted
            ):
                slot.forget()
        return is_restarted

    async def _release(self, slot: FrontSlot) -> None:
        async with self._changed:
            slot.is_busy = False
            self._changed.notify_all()
