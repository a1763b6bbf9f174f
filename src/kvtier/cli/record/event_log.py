"""Messages of vLLM's KV-event publisher: decoded, anonymised and written to a log.

A message is input from a network: one of another shape raises an error.

Source: ``vllm/distributed/kv_events.py``, versions 0.28 to 0.32.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from kvtier.errors import EventMessageError
from kvtier.recording.trace_file import TraceFile
from kvtier.recording.trace_salt import TraceSalt
from kvtier.sim.formats.kv_events import CLEARED, REMOVED, STORED, STORED_FIELDS
from kvtier.sim.formats.lines import MAX_TIME_S

NUM_PARTS = 3
"""Topic, sequence number, payload."""

SEQUENCE_BYTES = 8
MIN_FIELDS = 2
RANK_FIELD = 2

REMOVED_FIELDS = ("type", "block_hashes", "medium", "group_idx")
MEDIUM = re.compile(r"[A-Za-z0-9_.-]{1,32}")
OTHER_MEDIUM = "other"


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The block events of one step of an engine.

    Attributes:
        sequence: its number, from 0 at the publisher's start.
        time_s: time by the publisher's clock.
        rank: number of the data-parallel replica.
        events: its events, not validated.
    """

    sequence: int
    time_s: float
    rank: int
    events: Sequence[Any]  # Any: msgpack, checked where read


@dataclass(slots=True)
class EventCounts:
    """Counts of received batches and events.

    Attributes:
        num_batches: batches written.
        num_stored_blocks: blocks in the written stores.
        num_missing_batches: missing sequence numbers between two received batches.
        num_restarts: how often sequence numbers restarted.
        num_other_rank_batches: batches of other replicas than the first one received.
        num_skipped_events: events of an unknown kind or shape.
        first_sequence: number of the first batch; None before it.
        rank: the recorded replica; None before the first batch.
    """

    num_batches: int = 0
    num_stored_blocks: int = 0
    num_missing_batches: int = 0
    num_restarts: int = 0
    num_other_rank_batches: int = 0
    num_skipped_events: int = 0
    first_sequence: int | None = None
    rank: int | None = None

    def to_json(self) -> dict[str, int | None]:
        """Return the counts for programs."""
        return {name.removeprefix("num_"): count for name, count in asdict(self).items()}


class KVEventLog:
    """Writes the batches of one replica, the first from which it receives one.

    Args:
        file: the log.
        salt: makes the ids.

    Attributes:
        counts: what was received so far.
        is_full: whether the file has reached its limit; nothing is written from then on.
    """

    def __init__(self, file: TraceFile, salt: TraceSalt) -> None:
        self.counts = EventCounts()
        self.is_full = False
        self._file = file
        self._salt = salt
        self._first_s = 0.0
        self._last_sequence = -1

    def add(self, batch: EventBatch) -> None:
        """Write a batch, without its other fields.

        Raises:
            OSError: the file cannot be written.
        """
        counts = self.counts
        if counts.first_sequence is None:
            counts.first_sequence, counts.rank = batch.sequence, batch.rank
            self._first_s, self._last_sequence = batch.time_s, batch.sequence - 1
        if batch.rank != counts.rank:
            counts.num_other_rank_batches += 1
            return
        if batch.sequence > self._last_sequence:
            counts.num_missing_batches += batch.sequence - self._last_sequence - 1
        else:
            counts.num_restarts += 1
        self._last_sequence = batch.sequence
        events = [self._anonymise(event) for event in batch.events]
        kept = [event for event in events if event is not None]
        line = {"ts": round(max(0.0, batch.time_s - self._first_s), 6), "events": kept}
        self._write(json.dumps(line, separators=(",", ":")).encode("ascii") + b"\n")
        if self.is_full:
            return
        counts.num_batches += 1
        counts.num_skipped_events += len(events) - len(kept)
        counts.num_stored_blocks += sum(len(one["block_hashes"]) for one in kept if one["type"] == STORED)

    def close(self) -> None:
        """End the file; idempotent."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        self.is_full |= not self._file.has_room(len(line))
        if not self.is_full:
            self._file.write(line)

    def _anonymise(self, event: object) -> dict[str, Any] | None:  # Any: JSON
        """Return the fields of an event to write; None when it is of an unknown kind or shape."""
        fields = _fields_of(event)
        kind = fields.get("type")
        if kind == CLEARED:
            return {"type": CLEARED}
        ids = self._ids_of(fields.get("block_hashes"))
        if kind not in (STORED, REMOVED) or ids is None:
            return None
        kept: dict[str, Any] = {"type": kind, "block_hashes": ids, "medium": _medium_of(fields)}
        if kind == STORED:
            parent = fields.get("parent_block_hash")
            parent_ids = self._ids_of([] if parent is None else [parent])
            block_size = fields.get("block_size")
            if parent_ids is None or type(block_size) is not int or block_size < 1:
                return None
            kept |= {"parent_block_hash": next(iter(parent_ids), None), "block_size": block_size}
        group_idx = fields.get("group_idx")
        return kept | ({"group_idx": group_idx} if type(group_idx) is int else {})

    def _ids_of(self, hashes: object) -> list[int] | None:
        if not isinstance(hashes, list):
            return None
        names = [_name_of(block_hash) for block_hash in hashes]
        return [self._salt.id_of(name) for name in names if name is not None] if None not in names else None


def decode_batch(parts: Sequence[bytes]) -> EventBatch:
    """Decode one message. Pure.

    Raises:
        EventMessageError: it is not a batch of events.
    """
    if len(parts) != NUM_PARTS or len(parts[1]) != SEQUENCE_BYTES:
        raise EventMessageError(f"{len(parts)} parts")
    fields = _decode_fields(parts[2])
    time_s, events = fields[:MIN_FIELDS]
    is_number = isinstance(time_s, int | float) and not isinstance(time_s, bool)
    if not is_number or not abs(time_s) <= MAX_TIME_S:
        raise EventMessageError("its time is not a number")
    if not isinstance(events, list):
        raise EventMessageError("its events are not a list")
    rank = fields[RANK_FIELD] if len(fields) > RANK_FIELD else None
    if rank is not None and type(rank) is not int:
        raise EventMessageError("its rank is not an integer")
    return EventBatch(int.from_bytes(parts[1], "big"), float(time_s), rank or 0, events)


def _decode_fields(payload: bytes) -> list[Any]:  # Any: msgpack, checked where read
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EventMessageError("its payload is not msgpack") from error
    if not isinstance(fields, list) or len(fields) < MIN_FIELDS:
        raise EventMessageError("its payload is not a list of time and events")
    return fields


def _fields_of(event: object) -> Mapping[str, Any]:  # Any: msgpack
    """Return an event's fields by name; older releases of vLLM send them as a list."""
    if isinstance(event, dict):
        return event
    if isinstance(event, list) and event:
        names = STORED_FIELDS if event[0] == STORED else REMOVED_FIELDS
        return dict(zip(names, event, strict=False))
    return {}


def _medium_of(fields: Mapping[str, Any]) -> str | None:  # Any: msgpack
    medium = fields.get("medium")
    if medium is None:
        return None
    return medium if isinstance(medium, str) and MEDIUM.fullmatch(medium) else OTHER_MEDIUM


def _name_of(block_hash: object) -> bytes | None:
    if isinstance(block_hash, bytes):
        return b"b" + block_hash
    return b"i%d" % block_hash if type(block_hash) is int else None
