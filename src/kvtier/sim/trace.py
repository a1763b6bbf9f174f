"""A request trace: arrival times, lengths, and which blocks the prompts share.

A trace has no text: each full or last partial block of a prompt is one id, and equal ids mean equal content and equal
prefix, so an id suffices to make a key.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvtier.base import OffloadKey, make_offload_key
from kvtier.connector.common import StopReason as StopReason
from kvtier.errors import ConfigError

ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request.

    Attributes:
        arrival_s: arrival time, from the start of the trace.
        num_prompt_tokens: length of its prompt.
        num_output_tokens: length of its answer.
        hash_ids: one id for each block of the prompt, head first; the last one may stand for a partial block.
        stop: why its answer ended.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    stop: StopReason = StopReason.UNKNOWN


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        requests: the requests.
        block_tokens: prompt tokens that one id stands for.
        num_accesses: ids of all requests together, repeats included.
        num_unique_blocks: distinct ids.
    """

    requests: tuple[TraceRequest, ...]
    block_tokens: int
    num_accesses: int
    num_unique_blocks: int

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last; 0 for an empty trace."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0


class BlockKeys:
    """The key of each id, made once, because a trace has the same blocks again and again."""

    def __init__(self) -> None:
        self._keys: dict[int, OffloadKey] = {}

    def of(self, hash_ids: Iterable[int]) -> list[OffloadKey]:
        """Return the keys of ``hash_ids``, in order."""
        keys = self._keys
        try:
            return [keys[hash_id] for hash_id in hash_ids]
        except KeyError:
            return [keys.get(hash_id) or self._make(hash_id) for hash_id in hash_ids]

    def _make(self, hash_id: int) -> OffloadKey:
        key = self._keys[hash_id] = make_offload_key(hash_id.to_bytes(ID_BYTES, "big"), 0)
        return key


def make_trace(requests: Iterable[TraceRequest], block_tokens: int) -> Trace:
    """Return a trace of ``requests``, sorted by arrival; those of one instant keep their order. Pure."""
    ordered = tuple(sorted(requests, key=lambda request: request.arrival_s))
    num_accesses = sum(len(request.hash_ids) for request in ordered)
    unique = {hash_id for request in ordered for hash_id in request.hash_ids}
    return Trace(ordered, block_tokens, num_accesses, len(unique))


def merge_blocks(trace: Trace, num_blocks: int) -> Trace:
    """Return ``trace`` with so many of its blocks in one; partial blocks are left out. Pure.

    An id names a block with everything before it, so that of a longer block is that of its last part.

    Raises:
        ConfigError: ``num_blocks`` is below one.
    """
    if num_blocks < 1:
        raise ConfigError("num_blocks", num_blocks, "must be at least 1")
    if num_blocks == 1:
        return trace
    block_tokens = num_blocks * trace.block_tokens
    merged = (
        replace(
            one, hash_ids=one.hash_ids[num_blocks - 1 :: num_blocks][: one.num_prompt_tokens // block_tokens]
        )
        for one in trace.requests
    )
    return make_trace(merged, block_tokens)
