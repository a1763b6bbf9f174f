"""One request: its tokens, its device blocks, and where its prompt came from.

It decides nothing; the scheduler writes it. It has the attributes that ``kvtier.connector.protocols.Request``
asks for, so the connector reads it as it is.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from kvtier.connector.common import StopReason
from kvtier.engines.transformers.block_hash import extend_block_hashes


@dataclass(eq=False, slots=True)
class Request:
    """A request and its state.

    Attributes:
        request_id: unique within the engine.
        token_ids: prompt, then output.
        num_prompt_tokens: how many of them are the prompt.
        block_size_tokens: tokens in a block.
        root: parent digest of the first block.
        min_step_end_tokens: each step computes at least up to there, or its keys would be those of a shorter sequence.
        kv_transfer_params: hints for the connector.
        block_hashes: one digest for each full block of ``token_ids``.
        block_ids: its device blocks, in order.
        num_computed_tokens: tokens whose keys and values exist.
        num_filled_blocks: leading blocks whose bytes are in the pool.
        origins: prompt tokens that were not computed, by where they were found.
        num_failed_load_blocks: device blocks whose load failed.
        num_arriving_blocks: blocks that its next step computes with while they are loaded.
        is_known: whether the connector has seen the request in a step.
        started_s: clock reading at its start.
        first_token_s: clock reading at its first token.
        ended_s: clock reading at its end; None until then.
        logits: of each output token, when they are kept.
        stop: why its answer ended, for a recorded trace.
        is_traffic: whether somebody has asked it; what only hands over computed blocks is not recorded.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    block_size_tokens: int
    root: bytes
    min_step_end_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None  # Any: the connector's contract
    block_hashes: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_filled_blocks: int = 0
    origins: dict[str, int] = field(default_factory=dict)
    num_failed_load_blocks: int = 0
    num_arriving_blocks: int = 0
    is_known: bool = False
    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float | None = None
    logits: list[torch.Tensor] | None = None
    stop: StopReason = StopReason.UNKNOWN
    is_traffic: bool = True

    def __post_init__(self) -> None:
        self._extend_hashes()

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        """Add an output token."""
        self.token_ids.append(token_id)
        self._extend_hashes()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Return the block table of its one KV group."""
        return (list(self.block_ids),)

    def _extend_hashes(self) -> None:
        extend_block_hashes(self.block_hashes, self.token_ids, self.block_size_tokens, self.root)
