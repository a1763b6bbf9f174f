"""Sizes a device pool for planned turns: room for the longest prompt and little more, so that the others spill.

It serves nothing; the answers' tokens count though nobody knows them yet.
"""

from collections import Counter
from collections.abc import Iterable

from kvtier.cli.demo.conversation import Turn
from kvtier.errors import ConfigError

BLOCK_TOKENS = 16
"""Tokens in a device block: the engine's default, which the demo does not change."""

SPARE_RATIO = 1.1
"""Pool over longest prompt. A pool that only just holds one prompt never shows a hit on the device; one that holds
several shows little else."""


def choose_device_blocks(turns: Iterable[Turn], num_asked: int | None) -> int:
    """Return the size of the device pool in blocks. Pure.

    Args:
        turns: every turn.
        num_asked: what the user wants; None takes a little more than the longest prompt.

    Raises:
        ConfigError: the longest prompt and its answer do not fit what the user wants.
    """
    num_needed = -(-count_longest_tokens(turns) // BLOCK_TOKENS)
    if num_asked is None:
        return int(num_needed * SPARE_RATIO) + 1
    if num_asked < num_needed:
        remedy = f"must be at least {num_needed}: the longest prompt and its answer need as many"
        raise ConfigError("--device-blocks", num_asked, remedy)
    return num_asked


def count_longest_tokens(turns: Iterable[Turn]) -> int:
    """Return the tokens of the longest conversation, its last answer included. Pure."""
    totals: Counter[int] = Counter()
    for turn in turns:
        totals[turn.conversation] += len(turn.token_ids) + turn.num_answer_tokens
    return max(totals.values(), default=0)
