"""Logs of vLLM's KV cache events, from which requests are reconstructed.

vLLM publishes which blocks its device cache stores and removes. A log has one published batch per line, as JSON:
``ts`` in seconds, ``events`` and ``data_parallel_rank``, or a list of the three. An event is an object with ``type``,
or a list of the type and then the values in the order of vLLM's fields. A ``BlockStored`` of the first group in device
memory means that a request computed ``block_hashes`` behind ``parent_block_hash``; so a request is the chain from the
root to its last stored block. Events that continue a chain at most ``JOIN_GAP_S`` after its last event are the same
request: a long prompt is stored in several steps.

What such a log cannot show: a request that the device cache served completely stores nothing and is missing, and so
are lengths of answers. Blocks of the answer count as prompt. A chain that began before the log starts where the log
does. So a replay shows how often *computed* blocks could have been loaded, not the hit ratio of all requests.

Source: vLLM's ``distributed/kv_events.py``, version 0.32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier.sim.formats.base import TraceFormat
from kvtier.sim.formats.lines import Line, read_lines
from kvtier.sim.trace import TraceRequest

RANK = "data_parallel_rank"
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"
STORED_FIELDS = (
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx",
)  # fmt: skip
"""vLLM's order of fields; fields that newer versions append are not needed here."""

DEVICE_MEDIA = (None, "GPU")

JOIN_GAP_S = 2.0
"""Seconds. At 20 tokens a second an answer fills a block of 16 tokens every 0.8 s; a person's next turn rarely comes
within 2 s. Zero makes each event a request; a longer gap joins the turns of an agent."""

DEFAULT_BLOCK_TOKENS = 16


@dataclass(slots=True)
class _OpenRequest:
    """A request that may continue."""

    began_s: float
    last_s: float
    hash_ids: list[int] = field(default_factory=list)


class KVEventsFormat(TraceFormat):
    """Batches of vLLM's events; the block size is that of the log's first store."""

    block_tokens = DEFAULT_BLOCK_TOKENS

    @staticmethod
    def recognises(line: Line) -> bool:
        return {"ts", "events"} <= line.values.keys()

    @classmethod
    def read(cls, path: Path, block_tokens: int, time_unit_s: float | None) -> Iterator[TraceRequest]:
        del time_unit_s
        joiner = _Joiner(block_tokens)
        first_s: float | None = None
        ranks: set[object] = set()
        for line in read_lines(path, may_be_cut=True):
            ranks.add(rank := line.values.get(RANK))
            if len(ranks) > 1:
                raise line.fail(
                    rank, "a replica of another rank has its own cache: keep the lines of one rank"
                )
            time_s = line.seconds("ts")
            first_s = time_s if first_s is None else first_s
            now_s = max(0.0, time_s - first_s)
            yield from joiner.close_before(now_s - JOIN_GAP_S)
            for event in _events_of(line):
                if event.get("type") == STORED and _is_device_store(event):
                    joiner.store(line, event, now_s)
        yield from joiner.close_before(float("inf"))

    @classmethod
    def block_tokens_of(cls, path: Path) -> int | None:
        for line in read_lines(path, may_be_cut=True):
            for event in _events_of(line):
                if event.get("type") == STORED and _is_device_store(event):
                    return _block_size_of(line, event)
        return None


class _Joiner:
    """Joins the events of one request. Hashes are numbered in the order of first appearance.

    Args:
        block_tokens: the block size that every store must have.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._numbers: dict[int | str, int] = {}
        self._parents: dict[int, int | None] = {}
        self._open: dict[int, _OpenRequest] = {}
        self._ended: list[_OpenRequest] = []

    def store(self, line: Line, event: Mapping[str, Any], now_s: float) -> None:
        """Process a store of blocks."""
        block_tokens = _block_size_of(line, event)
        if block_tokens != self._block_tokens:
            remedy = f"the log began with blocks of {self._block_tokens} tokens: use the log of one engine"
            raise line.fail(block_tokens, remedy)
        parent = event.get("parent_block_hash")
        last = None if parent is None else self._number(line, parent)
        request = None if last is None else self._open.pop(last, None)
        if request is None:
            request = _OpenRequest(now_s, now_s, [] if last is None else self._chain(line, last))
        for block_hash in event["block_hashes"]:
            number = self._number(line, block_hash)
            self._parents[number] = last
            request.hash_ids.append(number)
            last = number
        request.last_s = now_s
        if last in self._open:
            self._ended.append(self._open[last])  # the same blocks, computed again after their eviction
        if last is not None:
            self._open[last] = request

    def close_before(self, limit_s: float) -> Iterator[TraceRequest]:
        """Yield the requests without events since before ``limit_s``; they cannot continue."""
        silent = [last for last, request in self._open.items() if request.last_s < limit_s]
        ended, self._ended = self._ended, []
        for request in [*ended, *map(self._open.pop, silent)]:
            num_tokens = len(request.hash_ids) * self._block_tokens
            yield TraceRequest(request.began_s, num_tokens, 0, tuple(request.hash_ids))

    def _chain(self, line: Line, last: int) -> list[int]:
        """Return the chain that ends with ``last``, as far back as the log has it.

        Raises:
            TraceError: the parents form a cycle.
        """
        chain: list[int] = []
        number: int | None = last
        while number is not None:
            if len(chain) > len(self._parents):
                raise line.fail(last, "the parents of this block form a cycle: the log is damaged")
            chain.append(number)
            number = self._parents.get(number)
        return chain[::-1]

    def _number(self, line: Line, block_hash: object) -> int:
        if isinstance(block_hash, bool) or not isinstance(block_hash, int | str):
            raise line.fail(block_hash, "a block hash must be an integer or text")
        return self._numbers.setdefault(block_hash, len(self._numbers))


def _events_of(line: Line) -> Iterator[Mapping[str, Any]]:  # Any: JSON
    """Yield the events of a batch as objects.

    Raises:
        TraceError: one of them is not an event.
    """
    events = line.values.get("events")
    if not isinstance(events, list):
        raise line.fail(events, "events must be a list: is it another format?")
    for event in events:
        if isinstance(event, list) and event:
            fields: dict[str, Any] = dict(zip(STORED_FIELDS, event, strict=False))
            yield fields if event[0] == STORED else {"type": event[0]}
        elif isinstance(event, dict):
            yield event
        else:
            raise line.fail(
                event, f'an event must be an object with "type", or a list such as ["{STORED}", ...]'
            )


def _is_device_store(event: Mapping[str, Any]) -> bool:
    return event.get("medium") in DEVICE_MEDIA and event.get("group_idx") in (None, 0)


def _block_size_of(line: Line, event: Mapping[str, Any]) -> int:
    block_tokens, hashes = event.get("block_size"), event.get("block_hashes")
    if type(block_tokens) is not int or block_tokens < 1:
        raise line.fail(block_tokens, "block_size of a store in device memory must be an integer from 1")
    if not isinstance(hashes, list):
        raise line.fail(hashes, "block_hashes must be a list")
    return block_tokens
