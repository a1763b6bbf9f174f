"""How much of a prefix that was found is worth loading.

It asks nobody and changes nothing. A prefix is loaded up to some block and computed from there on, so there is one
number to choose, and every choice has a time until the request's first token:

- the blocks that tiers have come up first, those of different tiers at the same time, behind what each has to load;
- meanwhile the engine computes the prompts that it has begun before; whichever takes longer counts;
- then the blocks go to the device, and the rest of the prompt is computed.

Others wait too: what is computed for this request keeps those that come behind it from the engine, what is loaded for
it those from the tier. That is added, at half its weight. The choice with the lowest sum is made; of equal ones the one
that loads most. What nobody has measured yet takes no time: it is loaded, and known afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier.load_cost import LinkRate, PrefillRate, compute_s
from kvtier.tiering.load_times import TierLoad
from kvtier.tiering.survey import BlockPlace

HIDDEN_WAIT_COST = 0.5
"""What a second costs that a request waits for a tier while it would have waited for the engine anyway. The queue may
be shorter than it looks, and the request loses its turn: who comes meanwhile is computed first, and an engine that is
busy half of the time gives half of what was hidden to those. At 0 a load of minutes that saves a second is free behind
any queue; at 1 nothing is hidden, and an engine that is behind computes what it could have been given."""

OTHERS_WEIGHT = 0.5
"""What a second costs that others wait for a request, beside one of its own. How many will come behind it is a guess.
At 0 each looks after itself, and an engine that is behind computes what a tier could give it: measured on a recorded
trace, with a tier at three quarters of its break-even, the median first token then came 11 % later than with everything
loaded. At 1 a request may wait long for the sake of others who never come."""


@dataclass(frozen=True, slots=True)
class PromptCosts:
    """What the times of a request depend on, beside its tiers.

    Attributes:
        first_token: leading tokens that the device has.
        end_token: length of the prompt.
        block_tokens: tokens that a block covers.
        block_bytes: bytes of a block on the device, all groups and workers together.
        rows_per_block: rows of host memory that it takes: one for each KV group that loads every block.
        prefill: how fast prompts are computed.
        to_device: the link from host memory to the device; None while nobody knows.
        queue_s: seconds that the engine needs for the prompts it has begun.
        num_queued: how many those are.
        deadline_s: seconds that a request may wait for its blocks; what takes longer would not be loaded in the end.
    """

    first_token: int
    end_token: int
    block_tokens: int
    block_bytes: int
    prefill: PrefillRate
    to_device: LinkRate | None = None
    queue_s: float = 0.0
    num_queued: int = 0
    deadline_s: float = float("inf")
    rows_per_block: float = 1.0


def plan_load_cut(places: Sequence[BlockPlace], tiers: Sequence[TierLoad], costs: PromptCosts) -> int:
    """Return how many of the leading blocks to load. Pure.

    Args:
        places: where each block of the run is.
        tiers: what a load from each tier would cost, by position.
        costs: the rest.
    """
    num_rows: dict[int, float] = {}
    promote_s = 0.0
    best, best_s = 0, first_token_s(0, promote_s, costs) + others_s(0, {}, tiers, costs)
    for num_blocks, place in enumerate(places, start=1):
        if place.tier is not None:
            own_rows = 0.0 if place.is_coming else costs.rows_per_block
            rows = num_rows[place.tier] = num_rows.get(place.tier, 0.0) + own_rows
            promote_s = max(promote_s, tiers[place.tier].time_s(rows))
            if promote_s > costs.deadline_s:
                break
        time_s = first_token_s(num_blocks, promote_s, costs) + others_s(num_blocks, num_rows, tiers, costs)
        if time_s <= best_s:
            best, best_s = num_blocks, time_s
    return best


def others_s(
    num_blocks: int, num_rows: Mapping[int, float], tiers: Sequence[TierLoad], costs: PromptCosts
) -> float:
    """Return what it costs others, in weighed seconds, when so many blocks are loaded. Pure.

    As many as are in front of it are taken to come behind it: what it computes keeps those waiting that the engine
    serves, what it loads those that wait for the same tier.

    Args:
        num_blocks: leading blocks of the run.
        num_rows: rows that each tier brings up for it.
        tiers: what a load from each tier would cost, by position.
        costs: of the request.
    """
    loading_s = sum(tiers[tier].num_queued * tiers[tier].own_s(rows) for tier, rows in num_rows.items())
    return OTHERS_WEIGHT * (loading_s + costs.num_queued * computing_s(num_blocks, costs))


def first_token_s(num_blocks: int, promote_s: float, costs: PromptCosts) -> float:
    """Return the seconds until the first token when so many blocks are loaded. Pure.

    Args:
        num_blocks: leading blocks of the run.
        promote_s: seconds until they are all in host memory.
        costs: of the request.
    """
    copy_s = costs.to_device.time_s(num_blocks * costs.block_bytes) if costs.to_device else 0.0
    hidden_s = HIDDEN_WAIT_COST * min(promote_s, costs.queue_s)
    return max(promote_s, costs.queue_s) + hidden_s + copy_s + computing_s(num_blocks, costs)


def computing_s(num_blocks: int, costs: PromptCosts) -> float:
    """Return the seconds that computing the rest of the prompt takes when so many blocks are loaded. Pure."""
    end_block = costs.first_token // costs.block_tokens + num_blocks
    computed_from = max(costs.first_token, end_block * costs.block_tokens)
    return compute_s(computed_from, costs.end_token, costs.prefill)


def list_unwanted(places: Sequence[BlockPlace], num_wanted: int) -> dict[int, list[int]]:
    """Return, for each tier of which nothing is loaded, the blocks that it has and that are not wanted. Pure."""
    used = {place.tier for place in places[:num_wanted]}
    unwanted: dict[int, list[int]] = {}
    for block, place in enumerate(places[num_wanted:], start=num_wanted):
        if place.tier is not None and place.tier not in used and not place.is_coming:
            unwanted.setdefault(place.tier, []).append(block)
    return unwanted
