"""Whose hints are worth believing: each source's hints are compared with what its sessions then did.

A hint that a session ends is right when the session does not come back within JUDGED_AFTER_S; one that it goes on, when
it does; a return time, when it is right to a factor of TIME_FACTOR. A source is a tenant, or else a session
(``RequestHints.source``). A source of which little is known is taken to be like all others. The hints of clients that
name no session cannot be compared: a policy that learns what hints are worth judges them all together.

Memory is bounded, and a source that changes is believed again after about MAX_VERDICTS right hints.
"""

from collections import OrderedDict
from heapq import heappop, heappush
from math import inf

from kvtier.hints.values import NO_HINTS, RequestHints

LEAST_RIGHT_RATIO = 0.6
"""Share of right hints below which a source is ignored. Coins are right half of the time; clients that are wrong with
three hints of ten are still worth listening to."""

PRIOR_VERDICTS = 6.0
"""Hints after which a source is judged by its own as much as by those of all. Fewer condemn an honest client for a bad
start; more believe a liar for longer."""

ALL_PRIOR_RIGHT, ALL_PRIOR_VERDICTS = 0.75, 20.0
"""Share of right hints that is assumed of all clients at the start, and after how many hints experience counts as
much."""

MAX_VERDICTS = 64.0
"""Verdicts that count for a source, at most; when there are more, old ones fade."""

JUDGED_AFTER_S = 600.0
"""Time after which a session without a further request counts as ended, where it said no time. Chats mostly go on
within two minutes; a longer time judges late, a shorter one takes slow readers for ended."""

TIME_FACTOR = 4.0
"""Factor by which a return time may be off. Clients know their times to a factor of about two."""

LEAST_TIME_S = 10.0
"""Return times below it count as it: clients cannot tell 1 s from 5 s, and it makes no difference."""

MAX_SOURCES = 4096
"""Sources that are remembered, those heard of last; each takes about 200 bytes."""

MAX_CLAIMS = 16_384
"""Sessions whose last hint is still open, at most; each takes about 300 bytes. The oldest are dropped unjudged."""


class Verdicts:
    """How often hints were right; old verdicts fade.

    Attributes:
        num_right: hints that were right.
        num: hints that were judged.
    """

    __slots__ = ("num", "num_right")

    def __init__(self, num_right: float = 0.0, num: float = 0.0) -> None:
        self.num_right = num_right
        self.num = num

    def add(self, *, is_right: bool) -> None:
        """Count a verdict."""
        if self.num >= MAX_VERDICTS:
            self.num_right *= 1 - 1 / MAX_VERDICTS
            self.num *= 1 - 1 / MAX_VERDICTS
        self.num_right += is_right
        self.num += 1


class Claim:
    """What a source has said of its session, until it is judged.

    Attributes:
        source: who said it.
        said_at_s: when.
        returns_in_s: the return time; inf when it only said that the session goes on, None when that it ends.
        is_open: whether it is still to be judged.
    """

    __slots__ = ("is_open", "returns_in_s", "said_at_s", "source")

    def __init__(self, source: str, said_at_s: float, returns_in_s: float | None) -> None:
        self.source = source
        self.said_at_s = said_at_s
        self.returns_in_s = returns_in_s
        self.is_open = True

    @property
    def judged_at_s(self) -> float:
        """When it is judged if the session has not come back by then."""
        wait_s = self.returns_in_s
        return self.said_at_s + (
            JUDGED_AFTER_S if wait_s is None or wait_s == inf else TIME_FACTOR * max(wait_s, LEAST_TIME_S)
        )

    def is_right_if_returned_at(self, now_s: float) -> bool:
        """Return whether it is right when the session comes back now. Pure."""
        if self.returns_in_s is None:
            return False
        if self.returns_in_s == inf:
            return True
        said_s, actual_s = max(self.returns_in_s, LEAST_TIME_S), max(now_s - self.said_at_s, LEAST_TIME_S)
        return said_s / TIME_FACTOR <= actual_s <= said_s * TIME_FACTOR


class HintTrust:
    """Judges the sources of hints. Used from one thread."""

    def __init__(self) -> None:
        self._all = Verdicts(ALL_PRIOR_RIGHT * ALL_PRIOR_VERDICTS, ALL_PRIOR_VERDICTS)
        self._by_source: OrderedDict[str, Verdicts] = OrderedDict()
        # The last claim of each session, oldest first, and (time to judge it, number, claim) of all that are open.
        self._claims: OrderedDict[str, Claim] = OrderedDict()
        self._due: list[tuple[float, int, Claim]] = []
        self._num_claims = 0

    def hear(self, hints: RequestHints, now_s: float) -> RequestHints:
        """Judge what was said before, by the arrival of a request; return its hints, or NO_HINTS if not to be believed.

        Args:
            hints: the request's.
            now_s: its time of arrival.
        """
        if hints is NO_HINTS:
            return hints
        self._judge_overdue(now_s)
        session = None if hints.session is None else f"{hints.tenant or ''}/{hints.session}"
        if session is not None and (claim := self._claims.pop(session, None)) is not None and claim.is_open:
            self._judge(claim, is_right=claim.is_right_if_returned_at(now_s))
        source = hints.source
        if source is None:
            return hints
        is_believed = self.right_ratio(source) >= LEAST_RIGHT_RATIO
        if session is not None and (hints.continues is not None or hints.returns_in_s is not None):
            self._open(session, Claim(source, now_s, _said(hints)))
        return hints if is_believed else NO_HINTS

    def right_ratio(self, source: str) -> float:
        """Return the expected share of right hints of a source, from 0 to 1. Pure."""
        of_all = self._all.num_right / self._all.num
        own = self._by_source.get(source)
        if own is None:
            return of_all
        return (own.num_right + PRIOR_VERDICTS * of_all) / (own.num + PRIOR_VERDICTS)

    def __len__(self) -> int:
        return len(self._by_source) + len(self._claims) + len(self._due)

    def _open(self, session: str, claim: Claim) -> None:
        self._claims[session] = claim
        if len(self._claims) > MAX_CLAIMS:
            _, oldest = self._claims.popitem(last=False)
            oldest.is_open = False
        self._num_claims += 1
        heappush(self._due, (claim.judged_at_s, self._num_claims, claim))
        if len(self._due) > 2 * MAX_CLAIMS:
            self._due = sorted(entry for entry in self._due if entry[2].is_open)

    def _judge_overdue(self, now_s: float) -> None:
        due = self._due
        while due and due[0][0] < now_s:
            claim = heappop(due)[2]
            if claim.is_open:
                self._judge(claim, is_right=claim.returns_in_s is None)

    def _judge(self, claim: Claim, *, is_right: bool) -> None:
        claim.is_open = False
        self._all.add(is_right=is_right)
        own = self._by_source.get(claim.source)
        if own is None:
            own = self._by_source[claim.source] = Verdicts()
            if len(self._by_source) > MAX_SOURCES:
                self._by_source.popitem(last=False)
        else:
            self._by_source.move_to_end(claim.source)
        own.add(is_right=is_right)


def _said(hints: RequestHints) -> float | None:
    if hints.is_ended:
        return None
    return inf if hints.returns_in_s is None else hints.returns_in_s
