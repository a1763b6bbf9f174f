"""The recurrent states of simulated requests: which are kept, on which device blocks, and how they are named.

A state has a device block of its own, as in vLLM: one for the running state of a request, which each token overwrites,
and one for each state that is kept. The latter are found by others under a name of their own, and are freed, and stay
cached, as soon as a later one is computed.

A page holds the keys and values of a block, or a state. ``merge_into_pages`` makes the blocks of a trace as long as
that asks for.
"""

from collections.abc import Sequence

from kvtier.engines.common.block_pool import DeviceBlockPool
from kvtier.sim.model import EngineModel, KeptStates
from kvtier.sim.request import NO_BLOCK, SimulatedRequest
from kvtier.sim.trace import Trace, merge_blocks

STATE_GROUP = 1
"""Index of the KV group of the states; keys and values are group 0."""

NUM_RUNNING_BLOCKS = 1
"""Device blocks for the state that each token overwrites."""

MAX_OTHER_STATES = NUM_RUNNING_BLOCKS + 2
"""Device blocks of a request beside the states that it keeps: the running one, one that the device had, one that is
loaded."""


class RequestStates:
    """Keeps the states of a simulated engine's requests on its device blocks. Used from one thread.

    Args:
        model: the engine.
        kept: where it keeps states.
        pool: its device blocks.
    """

    def __init__(self, model: EngineModel, kept: KeptStates, pool: DeviceBlockPool) -> None:
        self._block_tokens = model.block_tokens
        self._kept = kept
        self._pool = pool

    def find_prefix(self, request: SimulatedRequest) -> tuple[list[int], list[int]]:
        """Return the device blocks of the longest prefix at whose end the device holds the state, and that state's.

        At least one token is left to compute. Pure.
        """
        num_usable = (request.num_prompt_tokens - 1) // self._block_tokens
        prefix = self._pool.find_prefix(request.block_hashes[:num_usable])
        for num_blocks in range(len(prefix), 0, -1):
            state = self._pool.find_prefix([name_state(request.block_hashes[num_blocks - 1])])
            if state:
                return prefix[:num_blocks], state
        return [], []

    def count_blocks(self, request: SimulatedRequest) -> int:
        """Return how many device blocks the states of a request take at most, those of others included. Pure."""
        return len(list_kept_blocks(request, self._kept, self._block_tokens)) + MAX_OTHER_STATES

    def start(self, request: SimulatedRequest, prefix_state: Sequence[int], num_held_blocks: int) -> None:
        """Allocate the states of a request whose keys and values have their blocks.

        Args:
            request: it starts now.
            prefix_state: the state at the end of what the device holds; empty without any.
            num_held_blocks: blocks of its prompt that the device holds or that are to be loaded.
        """
        wanted = [
            block
            for block in list_kept_blocks(request, self._kept, self._block_tokens)
            if block >= num_held_blocks
        ]
        table = [NO_BLOCK] * len(request.block_hashes)
        num_device_blocks = request.num_device_tokens // self._block_tokens
        if prefix_state:
            table[num_device_blocks - 1] = prefix_state[0]
        if num_held_blocks > num_device_blocks:
            wanted.insert(0, num_held_blocks - 1)
        used = self._pool.allocate(prefix_state, len(wanted) + NUM_RUNNING_BLOCKS)
        for block, block_id in zip(wanted, used[len(prefix_state) :], strict=False):
            table[block] = block_id
        request.state_block_ids, request.used_state_blocks = table, used

    def list_kept(
        self, request: SimulatedRequest, first_token: int, end_token: int
    ) -> list[tuple[int, int, int]]:
        """Return the states after tokens in between: group, device block, tokens. Pure."""
        table = request.state_block_ids or []
        first, end = first_token // self._block_tokens, end_token // self._block_tokens
        return [
            (STATE_GROUP, table[block], (block + 1) * self._block_tokens)
            for block in range(first, min(end, len(table)))
            if table[block] != NO_BLOCK
        ]

    def publish(self, request: SimulatedRequest, first_token: int, end_token: int) -> None:
        """Let others find the states after tokens in between."""
        for _, block_id, num_tokens in self.list_kept(request, first_token, end_token):
            block_hash = request.block_hashes[num_tokens // self._block_tokens - 1]
            self._pool.publish([block_id], [name_state(block_hash)])

    def free_passed(self, request: SimulatedRequest, num_tokens: int) -> None:
        """Free the states before the last one that was kept within ``num_tokens``; they stay cached."""
        passed = {block_id for _, block_id, _ in self.list_kept(request, 0, num_tokens)[:-1]}
        self._pool.free([block_id for block_id in request.used_state_blocks if block_id in passed])
        request.used_state_blocks = [
            block_id for block_id in request.used_state_blocks if block_id not in passed
        ]

    def free(self, request: SimulatedRequest) -> None:
        """Free the states that a request still uses."""
        self._pool.free(request.used_state_blocks)


def list_kept_blocks(request: SimulatedRequest, kept: KeptStates, block_tokens: int) -> list[int]:
    """Return the blocks of a prompt after which its state is kept, in order. Pure."""
    step = 1 if kept.interval_tokens is None else kept.interval_tokens // block_tokens
    blocks = set(range(step - 1, len(request.block_hashes), step))
    last = (request.num_prompt_tokens - 1) // block_tokens - 1
    if kept.keeps_last and last >= 0:
        blocks.add(last)
    return sorted(blocks)


def name_state(block_hash: bytes) -> bytes:
    """Return the name of the state after a block in the device's prefix cache. Pure."""
    return block_hash + b"state"


def merge_into_pages(
    trace: Trace, kv_bytes_per_token: int, state_bytes: int, interval_tokens: int | None = None
) -> Trace:
    """Return ``trace`` in blocks whose keys and values are at least as long as a state, as vLLM makes them. Pure.

    They are as short as that allows, and divide an interval where one is given. An interval whose keys and values are
    shorter than a state is one block, as in the transformers engine. One that is no multiple of the trace's blocks
    changes nothing: ``EngineModel`` refuses it.

    Args:
        trace: the requests.
        kv_bytes_per_token: bytes of a token's keys and values, all layers together.
        state_bytes: bytes of a state, all layers together.
        interval_tokens: tokens between kept states; None: a state after each block.
    """
    num_blocks = max(1, -(-state_bytes // (kv_bytes_per_token * trace.block_tokens)))
    if interval_tokens is not None:
        num_in_interval, rest = divmod(interval_tokens, trace.block_tokens)
        if rest or num_in_interval < 1:
            return trace
        fitting = (size for size in range(num_blocks, num_in_interval) if num_in_interval % size == 0)
        num_blocks = next(fitting, num_in_interval)
    return merge_blocks(trace, num_blocks)
