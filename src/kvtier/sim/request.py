"""A request on its way through the simulated engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtier.sim.trace import ID_BYTES, TraceRequest

NO_BLOCK = -1
"""Stands in a table of states for a state that is not kept, or was on no device."""


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """One request; it fits the connector's protocol of a request.

    The answer's tokens take device blocks but have no hashes, because traces do not name them: they are never stored.

    Attributes:
        request_id: its number in the trace.
        arrival_s: when it came.
        num_prompt_tokens: length of its prompt, at least one.
        num_output_tokens: length of its answer.
        block_hashes: one hash for each full block of the prompt.
        kv_transfer_params: the hints of a simulated client; traces have none.
        block_ids: its device blocks; empty while it waits.
        state_block_ids: for each block of the prompt the device block with the state after it, or NO_BLOCK; None: the
            model has no states.
        used_state_blocks: those of them that are not freed yet, and the one of the running state.
        num_device_tokens: leading tokens that the device cache had.
        num_computed_tokens: tokens whose KV is in its blocks.
        loaded_tokens: tokens that were loaded, by where they came from.
        admitted_s: when it got device blocks.
        first_token_s: when its prompt was computed.
        is_scheduled: whether a step has computed a part of it.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: Sequence[bytes]
    kv_transfer_params: dict[str, Any] | None = None  # Any: what the protocol says
    block_ids: list[int] = field(default_factory=list)
    state_block_ids: list[int] | None = None
    used_state_blocks: list[int] = field(default_factory=list)
    num_device_tokens: int = 0
    num_computed_tokens: int = 0
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    is_scheduled: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens so far: the prompt, and the answer as soon as the prompt is computed."""
        has_answer = self.num_computed_tokens >= self.num_prompt_tokens
        return self.num_prompt_tokens + (max(1, self.num_output_tokens) if has_answer else 0)

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return its block tables: keys and values, and states where there are any."""
        return (self.block_ids,) if self.state_block_ids is None else (self.block_ids, self.state_block_ids)


def make_hash(hash_id: int) -> bytes:
    """Return the content hash of the block that a trace calls ``hash_id``. Pure."""
    return hash_id.to_bytes(ID_BYTES, "big")


def make_request(
    number: int, traced: TraceRequest, block_tokens: int, hash_of: Callable[[int], bytes] = make_hash
) -> SimulatedRequest:
    """Return request ``number`` of a trace. Pure.

    Args:
        number: its place in the trace.
        traced: what the trace says of it.
        block_tokens: tokens of a block.
        hash_of: ``make_hash``, or what remembers its answers: blocks come again and again.
    """
    num_tokens = max(1, traced.num_prompt_tokens)
    hashes = list(map(hash_of, traced.hash_ids[: num_tokens // block_tokens]))
    return SimulatedRequest(str(number), traced.arrival_s, num_tokens, traced.num_output_tokens, hashes)
