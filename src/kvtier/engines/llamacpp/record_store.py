"""Records in kvtier's host memory and in the tiers behind it.

A record is cut into pieces of one row each. The manager and its tiers are those that engines drive step by step; here a
wait is a loop of steps. Whatever goes wrong costs the records that it concerns: they are misses.
"""

import hashlib
import logging
import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from kvtier.base import LoadStoreSpec, OffloadKey, ReqContext, make_offload_key
from kvtier.config import HostSize, OffloadingConfig
from kvtier.cpu.auto_size import find_auto_size
from kvtier.cpu.common import CPULoadStoreSpec
from kvtier.cpu.manager import CPUPrimaryTierOffloadingManager
from kvtier.engines.llamacpp.blocks import BlockFormat, Record, RecordKind, TokenNames
from kvtier.errors import BlockNotReadyError, ConfigError, MissingExtraError, PlaceError, TierError
from kvtier.misses import HOST_ORIGIN, Miss
from kvtier.tiering.factory import create_secondary_tier
from kvtier.tiering.manager import TieringOffloadingManager

logger = logging.getLogger(__name__)

T = TypeVar("T")

SEARCH = "llama.cpp search"
"""The request of a search, for those who see requests."""

ROW_ALIGNMENT_BYTES = 4096
"""Rows begin on a page, as direct I/O of the fs tier needs."""

MAX_STATE_ROW_BYTES = 1 << 20
"""The row of a model that has only recurrent states. Larger ones waste the rest of the last piece; smaller ones are
more keys to look up."""

SHARES = 8
"""A load or a store uses at most this part of host memory at a time, so that it fits beside what tiers have pinned."""

DEADLINE_SLACK_S = 1.0
"""Seconds after the deadline within which the manager's own answer comes."""

INDEX_WAIT_S = 10.0
"""Seconds that a start waits until its tiers know what they hold: a million blocks take about one. Less computes the
first prompts after a start again; more delays a start whose disk hangs."""

FIRST_PAUSE_S, LAST_PAUSE_S = 0.0005, 0.01
"""Pauses between two steps of a wait, doubled from the first to the last: a disk answers in a millisecond, a server in
ten."""

DRAIN_S = 5.0
"""Seconds for which a save that is larger than its share of host memory waits for the tiers, after each share. Less
loses blocks to a slow tier; more keeps a request's load waiting behind the save."""


class PrivateRows:
    """Rows in anonymous memory, which the kernel gives page by page as they are used.

    Args:
        num_rows: how many.
        row_bytes: bytes of one.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        flat = np.frombuffer(mmap.mmap(-1, num_rows * row_bytes), np.int8)
        self._rows: np.ndarray[tuple[int, int], np.dtype[np.int8]] | None = flat.reshape(num_rows, row_bytes)

    def create_kv_memoryview(self) -> memoryview:
        """Return the rows."""
        assert self._rows is not None, "after the end"
        return self._rows.data

    def cleanup(self) -> None:
        """Let the memory go once no one refers to it."""
        self._rows = None


class Piece(NamedTuple):
    """One row of a record: its key, and which bytes of the record it has."""

    key: OffloadKey
    start: int
    stop: int


class Loaded(NamedTuple):
    """Records that were loaded.

    Attributes:
        payloads: their bytes, up to the first record that could not be loaded.
        missing: that record; None when all were loaded.
        tiers: for each record the type of the tier that it came from, "host" for host memory.
    """

    payloads: Mapping[Record, bytes]
    missing: Record | None
    tiers: Mapping[Record, str]


class RecordStore:
    """The records of one model. Used from one thread.

    Args:
        config: what identifies the model, with the user's settings.
        form: how conversations are cut.
        clock: seconds, monotonic.
        pause: waits for that many seconds.

    Attributes:
        config: as given.
        manager: which records' pieces are held.

    Raises:
        ConfigError: host memory is missing or too small, or a setting of a tier cannot work.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        form: BlockFormat,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.config = config
        self._form = form
        self._clock = clock
        self._pause = pause
        self._row_bytes = config.groups[0].page_size_bytes
        settings = config.settings
        self._num_rows = count_rows(config, form)
        self._share = max(1, self._num_rows // SHARES)
        primary = CPUPrimaryTierOffloadingManager(
            self._num_rows,
            PrivateRows(self._num_rows, self._row_bytes),
            settings.eviction_policy,
            ttl_s=settings.ttl_s,
        )
        view = primary.get_kv_memoryview()
        self._rows = np.asarray(view)
        tiers = []
        for entry in settings.secondary_tiers:
            try:
                tiers.append(create_secondary_tier(entry, view, config))
            except (TierError, PlaceError, MissingExtraError) as error:
                if entry.get("required"):
                    raise
                logger.warning("kvtier: a secondary tier is left out: %s", error)
        for tier in tiers:
            tier.wait_indexed(INDEX_WAIT_S)
        self.manager = TieringOffloadingManager(primary, tiers, lookup_deadline_s=settings.lookup_deadline_s)

    def count_held(self, names: TokenNames, records: Sequence[Record]) -> int:
        """Return how many leading records of a prompt are held somewhere, by their last pieces.

        Call this once for a prompt, before other searches: it announces the request to the tiers.
        """
        context = ReqContext(SEARCH)
        keys = [self._last_key(names, record) for record in records]
        self.manager.note_request([keys], context)
        located = self._wait(lambda: self.manager.locator.locate(keys, context))
        self.manager.request_finished(context)
        return 0 if located is None else len(located.places)

    def find_held(
        self, names: TokenNames, records: Iterable[Record], *, is_whole: bool = False
    ) -> set[Record]:
        """Return which records are held somewhere.

        Args:
            names: of the conversation.
            records: what to look for.
            is_whole: look for each piece; otherwise for the last, which is the first to be evicted.
        """
        searches: list[tuple[Record, list[OffloadKey], ReqContext]] = []
        for record in records:
            pieces = self._pieces(names, record)
            searches.append(
                (record, [one.key for one in pieces if is_whole or one is pieces[-1]], ReqContext(SEARCH))
            )
        found: set[Record] = set()
        left = searches

        def ask() -> bool | None:
            nonlocal left
            unanswered = []
            for record, keys, context in left:
                located = self.manager.locator.locate(keys, context)
                if located is None:
                    unanswered.append((record, keys, context))
                elif len(located.places) == len(keys):
                    found.add(record)
            left = unanswered
            return None if left else True

        self._wait(ask)
        for _, _, context in searches:
            self.manager.request_finished(context)
        return found

    def load(self, names: TokenNames, records: Sequence[Record]) -> Loaded:
        """Load records, up to the first that cannot be."""
        payloads: dict[Record, bytes] = {}
        tiers: dict[Record, str] = {}
        for share in self._shares(names, records):
            context = ReqContext("llama.cpp load")
            keys = [piece.key for _, pieces in share for piece in pieces]
            run = self._wait(lambda keys=keys, context=context: self._find_all(keys, context))  # type: ignore[misc]
            promoted = dict(self.manager.promoted_for(context))
            missing = _first_beyond(share, run or 0)
            if missing is None:
                try:
                    rows = _slots_of(self.manager.prepare_load(keys, context))
                except BlockNotReadyError:
                    missing = share[0][0]
            if missing is not None:
                self.manager.request_finished(context)
                return Loaded(payloads, missing, tiers)
            self.manager.touch(keys, context)
            left = iter(rows)
            for record, pieces in share:
                payloads[record] = b"".join(
                    self._rows[row, : piece.stop - piece.start].tobytes()
                    for piece, row in zip(pieces, left)  # noqa: B905
                )
                tiers[record] = promoted.get(pieces[0].key, HOST_ORIGIN)
            self.manager.complete_load(keys, context)
            self.manager.request_finished(context)
        return Loaded(payloads, None, tiers)

    def store(self, names: TokenNames, records: Sequence[tuple[Record, Callable[[], bytes]]]) -> int:
        """Store those records that are held nowhere; return how many are new.

        A HEAD is left out where the WINDOW in place of which it stands is held.
        """
        wanted = {record for record, _ in records} | {
            self._form.window_blocks(record.num_tokens)[0]
            for record, _ in records
            if record.kind is RecordKind.HEAD
        }
        held = self.find_held(names, wanted, is_whole=True)
        context = ReqContext("llama.cpp save")
        num_new = num_rows = 0
        for record, pack in records:
            is_head = record.kind is RecordKind.HEAD
            if record in held or (is_head and self._form.window_blocks(record.num_tokens)[0] in held):
                continue
            pieces = self._pieces(names, record)
            if not pieces or len(pieces) > self._share:
                continue
            num_stored = self._store_record(pieces, pack, context)
            if num_stored:
                held.add(record)
                num_new += 1
                num_rows += num_stored
            if num_rows >= self._share:
                num_rows = 0
                self.manager.end_step()
                self.manager.drain(DRAIN_S)
        # Head first: the tail of a conversation is evicted before what others share with it.
        self.manager.touch(
            [piece.key for record, _ in records for piece in self._pieces(names, record)], context
        )
        self.manager.request_finished(context)
        self.manager.end_step()
        return num_new

    def explain(self, names: TokenNames, record: Record) -> Miss | None:
        """Return why a record is missing; None when nothing is known of it."""
        return self.manager.explain(self._last_key(names, record), ReqContext(SEARCH))

    def drop(self, names: TokenNames, records: Iterable[Record]) -> None:
        """Forget records whose bytes are wrong."""
        self.manager.drop([piece.key for record in records for piece in self._pieces(names, record)])

    def step(self) -> None:
        """Go on with what tiers have under way."""
        self.manager.end_step()

    def close(self) -> None:
        """End the tiers once they have what is pending."""
        self.manager.shutdown()

    def _store_record(self, pieces: Sequence[Piece], pack: Callable[[], bytes], context: ReqContext) -> int:
        keys = [piece.key for piece in pieces]
        output = self._wait(lambda: self.manager.prepare_store(keys, context))
        if output is None or not output.keys_to_store:
            return 0
        payload = np.frombuffer(pack(), np.int8)
        by_key = {piece.key: piece for piece in pieces}
        for key, row in zip(output.keys_to_store, _slots_of(output.store_spec), strict=True):
            piece = by_key[key]
            num_bytes = piece.stop - piece.start
            self._rows[row, :num_bytes] = payload[piece.start : piece.stop]
            self._rows[row, num_bytes:] = 0  # no bytes of an earlier owner
        self.manager.complete_store(output.keys_to_store, context)
        return len(output.keys_to_store)

    def _find_all(self, keys: Sequence[OffloadKey], context: ReqContext) -> int | None:
        """Return how many leading keys are in host memory; None while a tier brings some."""
        run = self.manager.find_run(keys, context)
        return run.num_ready if run.num_ready == run.num_held else None

    def _wait(self, ask: Callable[[], T | None]) -> T | None:
        """Step until ``ask`` has an answer, or the manager should have given one."""
        answer = ask()
        if answer is not None:
            return answer
        end_s = self._clock() + self.config.settings.lookup_deadline_s + DEADLINE_SLACK_S
        pause_s = FIRST_PAUSE_S
        while answer is None and self._clock() < end_s:
            self.manager.end_step()
            self._pause(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            answer = ask()
        return answer

    def _shares(
        self, names: TokenNames, records: Sequence[Record]
    ) -> Iterable[list[tuple[Record, list[Piece]]]]:
        """Yield the records with their pieces, as many at a time as may be in host memory."""
        share: list[tuple[Record, list[Piece]]] = []
        num_pieces = 0
        for record in records:
            pieces = self._pieces(names, record)
            if share and num_pieces + len(pieces) > self._share:
                yield share
                share, num_pieces = [], 0
            share.append((record, pieces))
            num_pieces += len(pieces)
        if share:
            yield share

    def _pieces(self, names: TokenNames, record: Record) -> list[Piece]:
        size, name = self._form.record_bytes(record), names.name(record)
        group = min(record.kind.value, len(self.config.groups) - 1)
        return [
            Piece(
                make_offload_key(_name_piece(name, number), group),
                start,
                min(size, start + self._row_bytes),
            )
            for number, start in enumerate(range(0, size, self._row_bytes))
        ]

    def _last_key(self, names: TokenNames, record: Record) -> OffloadKey:
        return self._pieces(names, record)[-1].key


def plan_row_bytes(form: BlockFormat) -> int:
    """Return the size of a row: the smallest block of the model, so that few bytes of a last piece are unused. Pure."""
    kinds = (RecordKind.ROWS, RecordKind.WINDOW)
    sizes = [size for kind in kinds if (size := form.record_bytes(Record(kind, form.block_tokens)))]
    size = min(sizes) if sizes else min(form.state_bytes, MAX_STATE_ROW_BYTES)
    return -(-size // ROW_ALIGNMENT_BYTES) * ROW_ALIGNMENT_BYTES


def count_rows(config: OffloadingConfig, form: BlockFormat) -> int:
    """Return how many rows fit into host memory.

    Raises:
        ConfigError: ``cpu_bytes_to_use`` is missing, or has no room for what one load needs.
    """
    wanted, row_bytes = config.settings.cpu_bytes_to_use, config.groups[0].page_size_bytes
    num_bytes = find_auto_size(config, None).num_bytes if isinstance(wanted, HostSize) else wanted
    kinds = (RecordKind.ROWS, RecordKind.WINDOW, RecordKind.END)
    largest_bytes = max(form.record_bytes(Record(kind, 2 * form.block_tokens - 1)) for kind in kinds)
    least_bytes = SHARES * -(-largest_bytes // row_bytes) * row_bytes
    if num_bytes is None or num_bytes < least_bytes:
        remedy = f"is too small: a block has {largest_bytes} bytes, so give at least {least_bytes}"
        raise ConfigError("cpu_bytes_to_use", num_bytes, remedy)
    return num_bytes // row_bytes


def _slots_of(spec: LoadStoreSpec) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec), "the primary tier is host memory"
    slots: list[int] = spec.block_ids.tolist()
    return slots


def _first_beyond(share: Sequence[tuple[Record, Sequence[Piece]]], num_pieces: int) -> Record | None:
    """Return the first record that is not whole within so many leading pieces; None when all are. Pure."""
    for record, pieces in share:
        num_pieces -= len(pieces)
        if num_pieces < 0:
            return record
    return None


def _name_piece(name: bytes, number: int) -> bytes:
    return hashlib.sha256(name + number.to_bytes(4, "little")).digest() if number else name
