"""Finds the cheapest mix of tiers that reaches a goal, without trying each.

A ``MixEvaluator`` evaluates a mix. The capacities of a medium are a geometric series of sold sizes. For each kind of
mix (a set of media) the search assumes that more capacity is never worse, so that a border separates the mixes that
miss the goal from those that reach it. It also assumes that each mix writes at least as much to its tiers as the
lesser of two: the largest mix, and the one with the least host memory before the largest tiers.

1. Host memory alone is searched first. Tiers are then tried only with less host memory than is enough alone.
2. If the largest mix of a kind misses the goal, all mixes of the kind do.
3. Otherwise the border is walked as a staircase, from the least host memory and the largest tier behind it: after a mix
   that reaches the goal comes less of the tier, after one that misses it more host memory. For each capacity of a
   further tier that tries about as many mixes as both series are long together.
4. A mix costs at least its capacity and the least writes. It is not tried if that bound exceeds the cheapest of its
   kind or ``KEEP_RATIO`` times the cheapest of all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from kvtier.errors import ConfigError
from kvtier.planning.capacity_curve import list_capacities
from kvtier.planning.evaluator import MixEvaluator
from kvtier.planning.prices import GIB, Medium
from kvtier.planning.tier_mix import Bill, Goal, Mix, MixOutcome, Share, make_bill

KEEP_RATIO = 2.0
"""Kinds of mixes up to this many times the cheapest price are shown beside the cheapest, as alternatives. More would
try hundreds of mixes that are too expensive; 1 would show a single line."""

SMALLEST_SHARE = 1 / 64
"""Capacities begin with this share of the trace's blocks: smaller ones turn over before any block is reused."""


@dataclass(frozen=True, slots=True)
class Row:
    """A medium and the capacities of it to try.

    Attributes:
        medium: the medium.
        num_blocks: capacities, ascending.
    """

    medium: Medium
    num_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MixCandidate:
    """An evaluated mix.

    Attributes:
        mix: the mix.
        outcome: its results.
        bill: its cost.
        is_reached: whether it reaches the goal.
    """

    mix: Mix
    outcome: MixOutcome
    bill: Bill
    is_reached: bool


@dataclass(frozen=True, slots=True)
class Search:
    """Result of a search.

    Attributes:
        best: the cheapest mix of each kind that reaches the goal, cheapest first; empty when none does.
        closest: the mix that misses the goal by the least; None when one reaches it.
        too_expensive: kinds that cost more than ``KEEP_RATIO`` times the cheapest, whether or not they reach the goal.
        insufficient: kinds whose largest mix misses the goal, or that need as much host memory as without their tiers.
        num_tried: evaluated mixes.
        num_mixes: all mixes.
    """

    best: tuple[MixCandidate, ...]
    closest: MixCandidate | None
    too_expensive: tuple[tuple[str, ...], ...]
    insufficient: tuple[tuple[str, ...], ...]
    num_tried: int
    num_mixes: int


class _Searcher:
    """The mixes tried so far, and the price limit for further ones."""

    def __init__(
        self,
        goal: Goal,
        evaluator: MixEvaluator,
        block_bytes: int,
        duration_s: float,
        on_mix: Callable[[Mix], Callable[[], object] | None] | None,
    ) -> None:
        self.tried: dict[Mix, MixCandidate] = {}
        self.limit_usd = float("inf")
        self._best: dict[tuple[str, ...], MixCandidate] = {}
        self._least_written: dict[tuple[str, ...], dict[str, int]] = {}
        self._goal = goal
        self._evaluator = evaluator
        self._block_bytes = block_bytes
        self._duration_s = duration_s
        self._on_mix = on_mix

    def drop_sufficient_host(self, rows: tuple[Row, ...]) -> tuple[Row, ...]:
        """Return ``rows`` without the host memory that is enough alone, if that is known."""
        alone = self._best.get((rows[0].medium.name,))
        if alone is None or len(rows) == 1:
            return rows
        enough = alone.mix.shares[0].num_blocks
        less = tuple(number for number in rows[0].num_blocks if number < enough)
        return (Row(rows[0].medium, less), *rows[1:])

    def least_usd(self, rows: Sequence[Row]) -> float:
        """Return a lower bound of the cost of the smallest mix of a kind."""
        return _mix_at(rows, [0] * len(rows)).capacity_usd_per_month(self._block_bytes)

    def try_mix(self, mix: Mix) -> MixCandidate:
        """Return the results and cost of ``mix``; each mix is evaluated once."""
        known = self.tried.get(mix)
        if known is not None:
            return known
        outcome = self._evaluator.evaluate(mix, self._on_mix(mix) if self._on_mix is not None else None)
        bill = make_bill(mix, outcome, block_bytes=self._block_bytes, duration_s=self._duration_s)
        found = self.tried[mix] = MixCandidate(mix, outcome, bill, self._goal.is_reached(outcome))
        if found.is_reached:
            self.limit_usd = min(self.limit_usd, KEEP_RATIO * bill.usd_per_month)
            best = self._best.get(mix.kind)
            if best is None or bill.usd_per_month < best.bill.usd_per_month:
                self._best[mix.kind] = found
        return found

    def walk(self, rows: tuple[Row, ...]) -> MixCandidate:
        """Return the cheapest mix of a kind that reaches the goal; the largest must reach it."""
        ends = [len(row.num_blocks) - 1 for row in rows]
        first = _mix_at(rows, [0, *ends[1:]])
        if first.capacity_usd_per_month(self._block_bytes) <= self.limit_usd:
            self._record_least_writes(self.try_mix(first), self.try_mix(_mix_at(rows, ends)))
        # The largest capacity of further tiers first: it gives an upper bound of the cost.
        for rest in product(*(range(end, -1, -1) for end in ends[2:])):
            self._walk_border(rows, rest)
        return self._best[first.kind]

    def _walk_border(self, rows: tuple[Row, ...], rest: tuple[int, ...]) -> None:
        """Try the mixes along the staircase, with fixed capacities of further tiers."""
        host, last = 0, len(rows[1].num_blocks) - 1 if len(rows) > 1 else 0
        while host < len(rows[0].num_blocks) and last >= 0:
            mix = _mix_at(rows, [host, last, *rest][: len(rows)])
            best = self._best.get(mix.kind)
            limit_usd = self.limit_usd if best is None else min(self.limit_usd, best.bill.usd_per_month)
            if self._bound_usd(mix) > limit_usd or self.try_mix(mix).is_reached:
                last -= 1
            else:
                host += 1

    def _record_least_writes(self, *ends: MixCandidate) -> None:
        """Record a lower bound of the writes of a kind: those of the end of its border that writes less."""
        kind = ends[0].mix.kind
        self._least_written[kind] = {
            name: min(end.outcome.written_blocks[name] for end in ends) for name in kind
        }

    def _bound_usd(self, mix: Mix) -> float:
        """Return a lower bound of the cost of ``mix``."""
        written = self._least_written.get(mix.kind)
        if written is None:
            return mix.capacity_usd_per_month(self._block_bytes)
        least = MixOutcome(0.0, written, dict.fromkeys(written, 0))
        return make_bill(mix, least, block_bytes=self._block_bytes, duration_s=self._duration_s).usd_per_month


def make_row(medium: Medium, unique_blocks: int, block_bytes: int, max_bytes: int | None = None) -> Row:
    """Return the capacities of ``medium`` to try for a trace. Pure.

    They are doublings from SMALLEST_SHARE of the trace's blocks up to all of them, each rounded up to a sold size.
    Where none of these is within the limit, it is the largest capacity within the limit.

    Args:
        medium: the medium.
        unique_blocks: distinct blocks of the trace.
        block_bytes: bytes of a block.
        max_bytes: the largest capacity; None: no limit.

    Raises:
        ConfigError: no sold size within the limit holds a block.
    """
    limits = [
        limit for limit in (max_bytes, medium.max_gib and int(medium.max_gib * GIB)) if limit is not None
    ]
    largest = max(1, unique_blocks)
    smallest = max(1, round(largest * SMALLEST_SHARE))
    found: set[int] = set()
    for num_blocks in list_capacities(smallest, largest):
        sold = medium.sold_bytes(num_blocks * block_bytes)
        if all(sold <= limit for limit in limits):
            found.add(sold // block_bytes)
    if not found:
        found.add(medium.largest_sold_bytes(min(limits)) // block_bytes)
    if 0 in found:
        least = medium.sold_bytes(block_bytes)
        remedy = f"must be at least {least} bytes: less is not sold, or holds no block of {block_bytes} bytes"
        raise ConfigError(f"capacity of {medium.name}", min(limits), remedy)
    return Row(medium, tuple(sorted(found)))


def list_kinds(host: Row, tiers: Sequence[Row], max_tiers: int) -> tuple[tuple[Row, ...], ...]:
    """Return host memory alone and with each set of up to ``max_tiers`` tiers, the faster ones first. Pure."""
    ordered = sorted(tiers, key=lambda row: (row.medium.latency_ms, -row.medium.read_gb_s, row.medium.name))
    return tuple(
        (host, *chosen) for number in range(max_tiers + 1) for chosen in combinations(ordered, number)
    )


def search(
    kinds: Sequence[tuple[Row, ...]],
    goal: Goal,
    evaluator: MixEvaluator,
    *,
    block_bytes: int,
    duration_s: float,
    on_mix: Callable[[Mix], Callable[[], object] | None] | None = None,
) -> Search:
    """Return the cheapest mix of each kind.

    Args:
        kinds: media to combine, host memory first in each.
        goal: the goal.
        evaluator: evaluates a mix.
        block_bytes: bytes of a block.
        duration_s: duration of the trace.
        on_mix: called with each mix before its evaluation; returns a function to call after each request, for a
            progress bar.
    """
    searcher = _Searcher(goal, evaluator, block_bytes, duration_s, on_mix)
    cheap_first = sorted(
        kinds, key=lambda rows: (searcher.least_usd(rows), [row.medium.name for row in rows])
    )
    found: list[MixCandidate] = []
    insufficient: list[tuple[str, ...]] = []
    too_expensive: list[tuple[str, ...]] = []
    for all_rows in cheap_first:
        kind = tuple(row.medium.name for row in all_rows)
        rows = searcher.drop_sufficient_host(all_rows)
        if not rows[0].num_blocks:
            insufficient.append(kind)
        elif searcher.least_usd(rows) > searcher.limit_usd:
            too_expensive.append(kind)
        elif not searcher.try_mix(_mix_at(rows, [len(row.num_blocks) - 1 for row in rows])).is_reached:
            insufficient.append(kind)
        else:
            found.append(searcher.walk(rows))
    found.sort(key=lambda one: (one.bill.usd_per_month, one.mix.kind))
    kept = [one for one in found if one.bill.usd_per_month <= searcher.limit_usd]
    too_expensive += [one.mix.kind for one in found if one.bill.usd_per_month > searcher.limit_usd]
    closest = (
        None if found else min(searcher.tried.values(), key=lambda one: _distance(goal, one), default=None)
    )
    num_mixes = sum(_count(rows) for rows in kinds)
    return Search(
        tuple(kept), closest, tuple(too_expensive), tuple(insufficient), len(searcher.tried), num_mixes
    )


def _mix_at(rows: Sequence[Row], indexes: Sequence[int]) -> Mix:
    return Mix(tuple(Share(row.medium, row.num_blocks[at]) for row, at in zip(rows, indexes, strict=True)))


def _count(rows: Sequence[Row]) -> int:
    number = 1
    for row in rows:
        number *= len(row.num_blocks)
    return number


def _distance(goal: Goal, one: MixCandidate) -> tuple[float, float, tuple[str, ...]]:
    return goal.shortfall(one.outcome), one.bill.usd_per_month, one.mix.kind
