"""One message of vLLM's KV-event publisher, decoded: when, from which replica, what happened to which blocks.

It hears nothing and keeps nothing. A message is input from a network: what has another shape is an error.

Source: ``vllm/distributed/kv_events.py``, versions 0.28 to 0.32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvtier.errors import EventMessageError
from kvtier.sim.formats.lines import MAX_TIME_S

NUM_PARTS = 3
"""Topic, sequence number, payload."""

SEQUENCE_BYTES = 8
MIN_FIELDS = 2
RANK_FIELD = 2


@dataclass(frozen=True, slots=True)
class EventBatch:
    """What one step of an engine did to its blocks.

    Attributes:
        sequence: its number, from 0 at the publisher's start.
        time_s: the publisher's clock.
        rank: which data-parallel replica.
        events: its events, not checked yet.
    """

    sequence: int
    time_s: float
    rank: int
    events: Sequence[Any]  # Any: msgpack, checked where read


def decode_batch(parts: Sequence[bytes]) -> EventBatch:
    """Return the batch that a message is. Pure.

    Raises:
        EventMessageError: it is none.
    """
    if len(parts) != NUM_PARTS or len(parts[1]) != SEQUENCE_BYTES:
        raise EventMessageError(f"{len(parts)} parts")
    fields = _decode_fields(parts[2])
    time_s, events = fields[:MIN_FIELDS]
    is_number = isinstance(time_s, int | float) and not isinstance(time_s, bool)
    if not is_number or not abs(time_s) <= MAX_TIME_S:
        raise EventMessageError("its time is no number")
    if not isinstance(events, list):
        raise EventMessageError("its events are no list")
    rank = fields[RANK_FIELD] if len(fields) > RANK_FIELD else None
    if rank is not None and type(rank) is not int:
        raise EventMessageError("its rank is no whole number")
    return EventBatch(int.from_bytes(parts[1], "big"), float(time_s), rank or 0, events)


def _decode_fields(payload: bytes) -> list[Any]:  # Any: msgpack, checked where read
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EventMessageError("its payload is not msgpack") from error
    if not isinstance(fields, list) or len(fields) < MIN_FIELDS:
        raise EventMessageError("its payload is no list of time and events")
    return fields
