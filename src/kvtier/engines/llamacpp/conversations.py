"""Conversations in a record store: kept as slot files are saved, and found again as the longest prefix of a prompt."""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kvtier.engines.llamacpp.blocks import (
    BlockFormat,
    Record,
    RecordKind,
    TokenNames,
    assemble_slot,
    cut_slot,
)
from kvtier.engines.llamacpp.record_store import RecordStore
from kvtier.engines.llamacpp.slot_file import SlotFile, write_slot_file
from kvtier.errors import SlotFormatError
from kvtier.misses import Miss

logger = logging.getLogger(__name__)

MAX_BLOCKS_BACK = 8
"""Blocks before the end of the held rows in which an end of a window or a state is looked for. The server notes such
ends near those of prompts, where the rows of others end too. More find an end that lies further back; each block costs
64 lookups of a request that finds none."""

MAX_STATE_ENDS = 4096
"""Tokens at which the end of a prefix is looked for in a model that has only states, whose rows do not say where."""

MAX_TRIES = 4
"""How often a prefix is looked for again when a record of it is gone, or wrong, when it is loaded."""


class Prefix(NamedTuple):
    """A prefix of a prompt that is held.

    Attributes:
        num_tokens: its length.
        records: what it consists of.
    """

    num_tokens: int
    records: tuple[Record, ...]


NO_PREFIX = Prefix(0, ())


class Restored(NamedTuple):
    """A prefix that was loaded.

    Attributes:
        num_tokens: its length.
        data: the slot file.
        tokens_by_tier: how many tokens came from where.
    """

    num_tokens: int
    data: bytes | bytearray
    tokens_by_tier: Mapping[str, int]


NOTHING_RESTORED = Restored(0, b"", {})


class ConversationStore:
    """The conversations of one model. Used from one thread.

    Args:
        form: how they are cut.
        store: their records.
    """

    def __init__(self, form: BlockFormat, store: RecordStore) -> None:
        self.form = form
        self.store = store

    def keep(self, slot: SlotFile) -> int:
        """Store what is new in a slot file; return the number of records.

        Raises:
            SlotFormatError: it is not of this model, or its windows have another length.
        """
        check_slot(self.form, slot)
        names = TokenNames(slot.tokens, self.form.block_tokens)
        return self.store.store(names, list(cut_slot(self.form, slot)))

    def find(self, tokens: Sequence[int], gone: Collection[Record] = ()) -> Prefix:
        """Return the longest prefix that is held and leaves the server at least one token to compute.

        Args:
            tokens: the prompt.
            gone: records that count as not held.
        """
        form, names, limit = self.form, TokenNames(tokens, self.form.block_tokens), len(tokens) - 1
        size = form.block_tokens
        if form.layout.attention is None:
            self.store.count_held(names, [])
            num_blocks, upper, lower = limit // size, limit, limit - MAX_STATE_ENDS
        else:
            blocks = [Record(RecordKind.ROWS, end) for end in range(size, limit + 1, size)]
            num_blocks = self.store.count_held(names, blocks)
            first_gone = min(
                (record.num_tokens for record in gone if record in set(blocks)), default=limit + 1
            )
            num_blocks = min(num_blocks, (first_gone - 1) // size)
            upper = min(limit, (num_blocks + 1) * size - 1)
            lower = (num_blocks if form.is_cuttable else num_blocks - MAX_BLOCKS_BACK) * size
        ends = range(upper, max(0, lower - 1), -1)
        wanted = [Record(RecordKind.END, end) for end in ends if form.has_end_record(end)]
        held = self.store.find_held(names, wanted) - set(gone)
        return self._choose_end(names, ends, held, gone)

    def restore(self, tokens: Sequence[int], min_tokens: int = 1) -> Restored:
        """Load the longest prefix of a prompt that is held.

        Args:
            tokens: the prompt.
            min_tokens: a shorter prefix is of no use.
        """
        gone: set[Record] = set()
        names = TokenNames(tokens, self.form.block_tokens)
        for _ in range(MAX_TRIES):
            prefix = self.find(tokens, gone)
            if prefix.num_tokens < min_tokens:
                break
            loaded = self.store.load(names, prefix.records)
            if loaded.missing is not None:
                gone.add(loaded.missing)
                continue
            try:
                slot = assemble_slot(self.form, tokens[: prefix.num_tokens], loaded.payloads)
            except SlotFormatError as error:
                logger.warning("kvtier: stored blocks are wrong and are dropped: %s", error)
                self.store.drop(names, prefix.records)
                break
            return Restored(
                prefix.num_tokens, write_slot_file(slot), self._count_tokens(prefix, loaded.tiers)
            )
        return NOTHING_RESTORED

    def explain(self, tokens: Sequence[int], num_tokens: int) -> Miss | None:
        """Return why the block behind a prefix of so many tokens is missing; None when nothing is known of it."""
        size = self.form.block_tokens
        end = (num_tokens // size + 1) * size
        kind = RecordKind.END if self.form.layout.attention is None else RecordKind.ROWS
        names = TokenNames(tokens, size)
        return self.store.explain(names, Record(kind, end)) if end <= len(tokens) else None

    def _choose_end(
        self, names: TokenNames, ends: Sequence[int], held: Collection[Record], gone: Collection[Record]
    ) -> Prefix:
        """Return the longest prefix whose end and window are held."""
        form = self.form
        possible = [
            end for end in ends if not form.has_end_record(end) or Record(RecordKind.END, end) in held
        ]
        windows: set[Record] = set()
        if form.layout.window is not None and possible:
            wanted = {block for end in possible for block in form.window_blocks(end)}
            heads = {
                Record(RecordKind.HEAD, end)
                for end in possible
                if form.head_span(end)[1] > form.head_span(end)[0]
            }
            windows = self.store.find_held(names, wanted | heads) - set(gone)
        for end in possible:
            records = form.prefix_records(end)
            blocks = form.window_blocks(end) if form.layout.window is not None else []
            if not all(block in windows for block in blocks):
                head = Record(RecordKind.HEAD, end)
                if head not in windows or not all(block in windows for block in blocks[1:]):
                    continue
                records = [head if record == blocks[0] else record for record in records]
            return Prefix(end, tuple(records))
        return NO_PREFIX

    def _count_tokens(self, prefix: Prefix, tiers: Mapping[Record, str]) -> dict[str, int]:
        """Return how many tokens of a prefix came from which tier, by the records of their rows."""
        counts: dict[str, int] = {}
        num_left = prefix.num_tokens
        for record in prefix.records:
            if record.kind is RecordKind.ROWS:
                tier = tiers[record]
                counts[tier] = counts.get(tier, 0) + self.form.block_tokens
                num_left -= self.form.block_tokens
        if num_left:
            tier = tiers[prefix.records[-1]]
            counts[tier] = counts.get(tier, 0) + num_left
        return counts


def check_slot(form: BlockFormat, slot: SlotFile) -> None:
    """Refuse a slot file that cannot be cut into blocks of this model. Pure.

    Raises:
        SlotFormatError: it has another layout, or windows of another length.
    """
    if slot.layout != form.layout:
        raise SlotFormatError("its layout is not that of the self-test: another cache type, model or build")
    for state in (*slot.checkpoints, slot.state):
        if state.window is not None and len(state.window) != state.num_tokens - form.window_start(
            state.num_tokens
        ):
            raise SlotFormatError(
                f"{len(state.window)} rows of a window at {state.num_tokens} tokens, where the model's has "
                f"{form.window_tokens}"
            )
