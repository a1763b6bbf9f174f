"""Why prompts were computed: a report on the records of many requests.

``explain_records`` puts the records of an engine, a recording or a simulation into a table of origins and causes, says
what to do about the three largest causes, and looks for patterns that no single request shows: prompts whose prefix
always ends in the same early block, blocks larger than the prompts, an engine that needs no help.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvtier.misses import DEVICE_ORIGIN, Miss, MissCause, RequestRecord
from kvtier.observe.remedies import list_fields, remedy_of

NUM_FINDINGS = 3
"""Causes that come with what to do. More would hide the one that matters."""

MIN_REQUESTS = 5
"""Requests that make a pattern. Fewer may be alike by chance; more leave the first minutes of an engine unexplained."""

COMMON_RATIO = 0.5
"""Share of the requests that makes a pattern. A lower one names what does not matter; a higher one is blind to traffic
of two kinds."""

EARLY_RATIO = 0.25
"""A prefix that ends within this share of its prompt ends early. Higher takes a shared system prompt for a fault."""

SMALL_RATIO = 0.02
"""Share of all prompt tokens below which a cause is not worth a word."""

DOMINANT_RATIO = 1 / 3
"""Share of what was computed that makes a cause the one to look at. A higher one passes over what is worth mending; a
lower one names one of many."""

EXPECTED = frozenset({MissCause.PARTIAL_BLOCK, MissCause.AUDITED})
"""Causes that every engine has, and that no setting removes."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known besides the records.

    Attributes:
        source: where the records are from, for the headline.
        num_requests: requests in all, of which only the latest may have records; None: as many as there are records.
        num_rejected: requests of a simulation that need more device blocks than there are; they have no record.
    """

    source: str = ""
    num_requests: int | None = None
    num_rejected: int = 0


@dataclass(frozen=True, slots=True)
class CauseRow:
    """One row of the table of causes.

    Attributes:
        cause: why tokens were computed.
        tier: the tier that it is about; empty when it is about none.
        reason: a kind within the cause; empty without one.
        num_tokens: how many tokens.
        num_requests: of how many requests.
        example: the miss of the request with the most of these tokens.
        req_id: that request.
    """

    cause: MissCause
    tier: str
    reason: str
    num_tokens: int
    num_requests: int
    example: Miss
    req_id: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to know or to do.

    Attributes:
        name: a short name for programs: a cause with its reason, or a pattern.
        text: what was found, and what to do.
        num_tokens: prompt tokens that it is about.
    """

    name: str
    text: str
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WhyReport:
    """The answer to "why are there no hits?".

    Attributes:
        source: where the records are from.
        num_requests: requests with a record.
        num_prompt_tokens: tokens of their prompts.
        tokens_by_origin: tokens that were not computed, by origin.
        causes: why the others were, the most first.
        findings: patterns, then the largest causes with what to do.
    """

    source: str
    num_requests: int
    num_prompt_tokens: int
    tokens_by_origin: Mapping[str, int] = field(default_factory=dict)
    causes: Sequence[CauseRow] = ()
    findings: Sequence[Finding] = ()

    @property
    def num_missed_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return sum(row.num_tokens for row in self.causes)

    def to_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the report as a JSON object."""
        return {
            "source": self.source,
            "requests": self.num_requests,
            "prompt_tokens": self.num_prompt_tokens,
            "origins": dict(self.tokens_by_origin),
            "causes": [
                {
                    "cause": row.cause.value,
                    "tier": row.tier,
                    "reason": row.reason,
                    "tokens": row.num_tokens,
                    "requests": row.num_requests,
                    "example": {"request": row.req_id, **row.example.detail},
                }
                for row in self.causes
            ],
            "findings": [
                {"name": found.name, "tokens": found.num_tokens, "text": found.text}
                for found in self.findings
            ],
        }


def explain_records(records: Sequence[RequestRecord], situation: Situation = Situation()) -> WhyReport:
    """Return why the prompts of ``records`` were computed, and what to do. Pure.

    Args:
        records: of the latest requests; each sums to its prompt.
        situation: what is known besides.
    """
    origins: Counter[str] = Counter()
    for record in records:
        origins.update(record.tokens_by_origin)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in records)
    causes = tabulate_causes(records)
    if not records:
        findings = [_explain_nothing(situation)]
    else:
        patterns = find_patterns(records, origins, causes) or _say_that_none_stands_out(causes)
        findings = [*patterns, *_explain_largest(causes, num_prompt_tokens)]
    return WhyReport(situation.source, len(records), num_prompt_tokens, dict(origins), causes, findings)


def tabulate_causes(records: Sequence[RequestRecord]) -> list[CauseRow]:
    """Return the causes of all records, the most tokens first. Pure."""
    tokens: Counter[tuple[MissCause, str, str]] = Counter()
    requests: Counter[tuple[MissCause, str, str]] = Counter()
    examples: dict[tuple[MissCause, str, str], tuple[int, Miss, str]] = {}
    for record in records:
        labels = set()
        for run in record.missed:
            label = run.miss.cause, run.miss.tier, str(run.miss.detail.get("reason", ""))
            labels.add(label)
            tokens[label] += run.num_tokens
            if label not in examples or examples[label][0] < run.num_tokens:
                examples[label] = run.num_tokens, run.miss, record.req_id
        requests.update(labels)
    return [
        CauseRow(*label, num_tokens, requests[label], examples[label][1], examples[label][2])
        for label, num_tokens in tokens.most_common()
    ]


def find_patterns(
    records: Sequence[RequestRecord], origins: Mapping[str, int], causes: Sequence[CauseRow]
) -> list[Finding]:
    """Return what many requests have in common. Pure."""
    found = [
        _find_own_cache(origins, causes),
        _find_small_prompts(records),
        _find_salts(records),
        _find_other_keys(records, origins),
        _find_early_end(records),
        _find_returns(records),
    ]
    return [finding for finding in found if finding is not None]


def _explain_nothing(situation: Situation) -> Finding:
    if situation.num_rejected:
        text = (
            f"No request could be served: each of {situation.num_rejected:,} needs more device blocks than there are. "
            "Give the simulated engine more --device."
        )
        return Finding("all_rejected", text)
    text = (
        "No request has begun yet. Send one; if an engine serves requests, they do not reach kvtier: is its connector "
        "configured?"
    )
    return Finding("no_requests", text)


def _explain_largest(causes: Sequence[CauseRow], num_prompt_tokens: int) -> list[Finding]:
    # What every engine has comes last, whatever it amounts to.
    ordered = sorted(causes, key=lambda row: row.cause in EXPECTED)
    worth = [row for row in ordered if row.num_tokens >= SMALL_RATIO * num_prompt_tokens]
    return [_explain(row, num_prompt_tokens) for row in worth[:NUM_FINDINGS]]


def _say_that_none_stands_out(causes: Sequence[CauseRow]) -> list[Finding]:
    lacking = [row for row in causes if row.cause not in EXPECTED]
    num_tokens = sum(row.num_tokens for row in lacking)
    if not lacking or lacking[0].num_tokens >= DOMINANT_RATIO * num_tokens:
        return []
    share = lacking[0].num_tokens / num_tokens
    text = (
        f"No single cause stands out: of what was computed and might have been found the largest, "
        f"{lacking[0].cause.value}, has {share:.0%}."
    )
    return [Finding("no_single_cause", text, num_tokens)]


def _explain(row: CauseRow, num_prompt_tokens: int) -> Finding:
    parts = [row.cause.value, *list_fields(row.example)] if row.cause is MissCause.OTHER_NAMESPACE else []
    name = ":".join(parts or filter(None, (row.cause.value, row.reason)))
    about = f" ({row.tier})" if row.tier else ""
    detail = ", ".join(
        f"{value:g} s earlier" if key == "ago_s" and isinstance(value, int | float) else f"{key} {value}"
        for key, value in row.example.detail.items()
    )
    share = row.num_tokens / max(1, num_prompt_tokens)
    text = (
        f"{row.num_tokens:,} tokens ({share:.1%}) of {row.num_requests:,} requests: {row.cause.value}{about}. "
        f"{remedy_of(row.example)} For example request {row.req_id}{f': {detail}' if detail else ''}."
    )
    return Finding(name, text, row.num_tokens)


def _find_own_cache(origins: Mapping[str, int], causes: Sequence[CauseRow]) -> Finding | None:
    """Find an engine whose own prefix cache serves everything."""
    num_device_tokens = origins.get(DEVICE_ORIGIN, 0)
    num_lacking = sum(row.num_tokens for row in causes if row.cause not in EXPECTED)
    has_loaded = any(origin != DEVICE_ORIGIN for origin in origins)
    if has_loaded or num_lacking > SMALL_RATIO * num_device_tokens:
        return None
    text = (
        "All is well: device memory held every prefix, so nothing was left to load, and hits of the tiers are 0. They "
        "begin when the device no longer holds what comes back."
    )
    return Finding("all_from_device", text, num_device_tokens) if num_device_tokens else None


def _find_small_prompts(records: Sequence[RequestRecord]) -> Finding | None:
    """Find prompts that are shorter than a block."""
    short = [
        record
        for record in records
        if not record.tokens_by_origin
        and {run.miss.cause for run in record.missed} == {MissCause.PARTIAL_BLOCK}
    ]
    if not _is_common(short, records):
        return None
    longest = max(record.num_prompt_tokens for record in short)
    text = (
        f"{len(short):,} of {len(records):,} prompts are shorter than a block, the longest has {longest:,} tokens: "
        "nothing of them can be stored or loaded. Use a smaller block_size."
    )
    return Finding("block_larger_than_prompts", text, sum(record.num_prompt_tokens for record in short))


def _find_salts(records: Sequence[RequestRecord]) -> Finding | None:
    """Find requests whose salts keep them from sharing."""
    salted = {
        record.req_id: str(run.miss.detail["cache_salt"])
        for record in records
        for run in record.missed
        if run.first_token == 0 and "cache_salt" in run.miss.detail
    }
    num_salts = len(set(salted.values()))
    if len(salted) < MIN_REQUESTS or len(salted) < COMMON_RATIO * len(records) or num_salts < len(salted) / 2:
        return None
    text = (
        f"{len(salted):,} requests came with {num_salts:,} different cache_salt values and found nothing: prompts are "
        "shared only among requests of one salt. Use one salt for all users that may share, or none."
    )
    return Finding("cache_salt_per_user", text)


def _find_other_keys(records: Sequence[RequestRecord], origins: Mapping[str, int]) -> Finding | None:
    """Find an engine that has loaded nothing, beside blocks of the same model under other keys.

    One that loads has blocks of its own: what is new to it is new.
    """
    if any(origin != DEVICE_ORIGIN for origin in origins):
        return None
    missed = [
        run
        for record in records
        for run in record.missed
        if run.miss.cause is MissCause.NEVER_SEEN and "namespace" in run.miss.detail
    ]
    num_tokens = sum(run.num_tokens for run in missed)
    if num_tokens < COMMON_RATIO * sum(record.num_missed_tokens for record in records):
        return None
    detail = missed[0].miss.detail if missed else {}
    fields = ", ".join(f"{name} {detail[name]}" for name in list_fields(missed[0].miss)) if missed else ""
    if not fields:
        return None
    text = (
        f"{num_tokens:,} tokens are new here, and the same place has blocks of the same model in namespace "
        f"{detail['namespace']}, with {fields}: with other keys none of them can be found. If the prompts are those of "
        "before, start the engine with the same values as before."
    )
    return Finding("other_keys", text, num_tokens)


def _find_early_end(records: Sequence[RequestRecord]) -> Finding | None:
    """Find prefixes that end at the same early token, as with a time stamp behind the head of a system prompt.

    Prompts that share nothing are no such prefixes: they may simply be different.
    """
    ends = Counter(
        record.missed[0].first_token
        for record in records
        if record.missed
        and record.missed[0].first_token > 0
        and record.missed[0].miss.cause is MissCause.NEVER_SEEN
        and "cache_salt" not in record.missed[0].miss.detail
        and record.missed[0].first_token <= EARLY_RATIO * record.num_prompt_tokens
    )
    if not ends:
        return None
    token, num_requests = ends.most_common(1)[0]
    if num_requests < MIN_REQUESTS or num_requests < COMMON_RATIO * len(records):
        return None
    text = (
        f"{num_requests:,} of {len(records):,} requests share a prefix that ends at token {token:,}: the block from "
        "there on differs each time. If they should share more, look near it for a time stamp, a user's name, a random "
        "id, a history that was cut or tools in another order, and move it to the end of the prompt."
    )
    return Finding("prefix_ends_early", text)


def _find_returns(records: Sequence[RequestRecord]) -> Finding | None:
    """Find blocks that come back some time after they have left; of those that left long ago the time is not known."""
    runs = [
        (run.num_tokens, run.miss)
        for record in records
        for run in record.missed
        if run.miss.cause is MissCause.EVICTED
    ]
    num_tokens = sum(count for count, _ in runs)
    if num_tokens < SMALL_RATIO * sum(record.num_prompt_tokens for record in records):
        return None
    tier = Counter(miss.tier for _, miss in runs).most_common(1)[0][0] if runs else ""
    if not runs:
        return None
    times_s = [float(miss.detail["ago_s"]) for _, miss in runs if "ago_s" in miss.detail]
    place = tier or "what is kept"
    when = f", {median(times_s):,.0f} s later (median)" if times_s else ""
    text = (
        f"{num_tokens:,} tokens had left {place} when they were asked for again{when}: "
        f"{place} is too small for how late prompts come back. kvtier simulate shows with a recording what more brings."
    )
    return Finding(f"{tier or 'memory'}_too_small", text, num_tokens)


def _is_common(some: Sequence[RequestRecord], every: Sequence[RequestRecord]) -> bool:
    return len(some) >= min(MIN_REQUESTS, len(every)) and len(some) >= COMMON_RATIO * len(every)
