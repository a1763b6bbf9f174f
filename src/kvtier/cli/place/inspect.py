"""``kvtier inspect PLACE``: what is in a tier's place, whose it is, and how old."""

import json
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from kvtier.base import TENANT_BYTES
from kvtier.cli.place.options import (
    ConfigOption,
    JsonOption,
    KeyFileOption,
    PlaceArgument,
    counted,
    describe,
    in_words_from,
    opened,
    printable,
    read_document,
)
from kvtier.cli.place.request_tenants import RequestTenants, read_engine_settings
from kvtier.errors import NamespaceDocumentError
from kvtier.namespace import differences
from kvtier.quantities import size_in_words
from kvtier.tenants import make_tenants
from kvtier.tiering.kit.place import Amount, Place, PlaceBlock, PlaceNamespace, PlaceSummary

NONE = "(none)"
NOT_NAMED = "--config names it"

AGES_S = (3600.0, 86_400.0, 604_800.0)
AGE_WORDS = ("within an hour", "within a day", "within a week", "longer ago")
"""What ages are counted by: about the lives of a chat, of a day's work, and of what nothing uses any more."""

MAX_LINE_CHARS = 100
"""Where the description of a namespace is broken; a longer part has a line of its own."""

MAX_DIFFERENCES = 6
"""Differences to the largest namespace that are printed; ``--json`` has the documents."""


@dataclass(slots=True)
class NamespaceTally:
    """What was counted of one namespace.

    Attributes:
        blocks: blocks that can be found.
        num_bytes: what they take, headers and shared objects included.
        oldest_s: the longest unused, seconds since 1970; None without times.
        newest_s: the last used.
        tenants: the same of each tenant of requests, by number, 0 for none.
        by_age: blocks by the longest time in AGES_S within which they were used; the last entry: older than that.
    """

    blocks: int = 0
    num_bytes: int = 0
    oldest_s: float | None = None
    newest_s: float | None = None
    tenants: dict[int, Amount] = field(default_factory=dict)
    by_age: list[int] = field(default_factory=lambda: [0] * (len(AGES_S) + 1))

    def add(self, block: PlaceBlock, now_s: float) -> None:
        """Count a block, and for its tenant where the tier names one."""
        self.blocks += block.num_blocks
        self.num_bytes += block.num_bytes
        if block.tenant is not None:
            amount = self.tenants.get(block.tenant, Amount())
            self.tenants[block.tenant] = amount.plus(block.num_blocks, block.num_bytes)
        if block.used_s is not None:
            self.oldest_s = block.used_s if self.oldest_s is None else min(self.oldest_s, block.used_s)
            self.newest_s = block.used_s if self.newest_s is None else max(self.newest_s, block.used_s)
            self.by_age[bisect_left(AGES_S, now_s - block.used_s)] += block.num_blocks


def inspect(
    place: PlaceArgument,
    config: ConfigOption = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is in a tier's place: namespaces in words, blocks, bytes, ages. Reads names, not blocks.

    Raises:
        KVTierError: the place cannot be read.
    """
    tenants = {} if config is None else read_tenants(config)
    with opened(place, key_file) as found:
        namespaces = found.namespaces()
        now_s = time.time()
        told = RequestTenants(namespaces, found.opener).told(found.blocks())
        tallies = count(told, namespaces, now_s)
        summary = found.summary()
        if as_json:
            typer.echo(json.dumps(to_json(found, namespaces, tallies, summary, tenants), indent=1))
        else:
            lines = to_lines(found, namespaces, tallies, summary, now_s, tenants)
            typer.echo("\n".join(map(printable, lines)))


def count(
    blocks: Iterable[PlaceBlock], namespaces: Sequence[PlaceNamespace], now_s: float
) -> dict[str, NamespaceTally]:
    """Return what there is of each namespace."""
    tallies = {namespace.name: NamespaceTally() for namespace in namespaces}
    for block in blocks:
        tallies.setdefault(block.namespace, NamespaceTally()).add(block, now_s)
    return tallies


def to_lines(
    place: Place,
    namespaces: Sequence[PlaceNamespace],
    tallies: dict[str, NamespaceTally],
    summary: PlaceSummary,
    now_s: float,
    tenants: Mapping[int, str],
) -> list[str]:
    """Return what is printed. Pure."""
    described = {namespace.name: namespace for namespace in namespaces}
    names = sorted(tallies, key=lambda name: (-tallies[name].num_bytes, name))
    total = Amount(
        sum(one.blocks for one in tallies.values()), sum(one.num_bytes for one in tallies.values())
    )
    lines = [
        f"{place.where}: tier {place.tier}, {counted(total.num, 'block')}, {size_in_words(total.num_bytes)}"
    ]
    if summary.capacity_bytes:
        share = total.num_bytes / summary.capacity_bytes
        lines.append(f"capacity {size_in_words(summary.capacity_bytes)}, {share:.1%} of it used")
    else:
        lines.append("no capacity: none is set here, or no engine that sets one uses it now")
    lines += _amount_lines(summary)
    lines.append(
        f"in use by {', '.join(summary.users)}" if summary.users else "no engine is known to use it now"
    )
    lines += _age_lines(tallies) + _tenant_lines(described, tallies)
    largest = described.get(names[0]) if names else None
    for name in names:
        namespace = described.get(name, PlaceNamespace(name))
        lines += ["", *_namespace_lines(namespace, tallies[name], now_s)]
        lines += _request_tenant_lines(tallies[name], tenants)
        if largest is not None and namespace.name != largest.name:
            lines += _difference_lines(largest, namespace)
    return lines


def to_json(
    place: Place,
    namespaces: Sequence[PlaceNamespace],
    tallies: dict[str, NamespaceTally],
    summary: PlaceSummary,
    tenants: Mapping[int, str],
) -> dict[str, Any]:  # Any: JSON
    """Return the same for programs. Pure."""
    described = {namespace.name: namespace for namespace in namespaces}
    total_bytes = sum(tally.num_bytes for tally in tallies.values())
    return {
        "place": place.where,
        "tier": place.tier,
        "blocks": sum(tally.blocks for tally in tallies.values()),
        "bytes": total_bytes,
        "capacity_bytes": summary.capacity_bytes,
        "used_ratio": total_bytes / summary.capacity_bytes if summary.capacity_bytes else None,
        "temporary": asdict_of(summary.temporary),
        "foreign": asdict_of(summary.foreign),
        "other_format": asdict_of(summary.other_format),
        "users": list(summary.users),
        "namespaces": [
            {
                "name": name,
                "identity": read_document(described.get(name, PlaceNamespace(name))),
                "blocks": tally.blocks,
                "bytes": tally.num_bytes,
                "oldest_use_s": tally.oldest_s,
                "newest_use_s": tally.newest_s,
                "tenants": [
                    {"number": in_hex(number), "name": tenants.get(number), "blocks": num, "bytes": num_bytes}
                    for number, (num, num_bytes) in sorted(tally.tenants.items())
                ],
                "blocks_by_last_use": dict(zip(AGE_WORDS, tally.by_age, strict=True)),
            }
            for name, tally in sorted(tallies.items())
        ],
    }


def read_tenants(config: Path) -> dict[int, str]:
    """Return the names of the tenants that an engine's settings list, by number.

    Raises:
        KVTierError: the file cannot be read, or its setting ``tenants`` cannot work.
    """
    tenants = make_tenants(read_engine_settings(config))
    return {} if tenants is None else dict(tenants.names)


def in_hex(number: int) -> str:
    """Return a tenant's number as the name of a block has it: of a number of JSON many programs keep 53 bits. Pure."""
    return f"{number:0{2 * TENANT_BYTES}x}"


def asdict_of(amount: Amount) -> dict[str, int]:
    """Return an amount as JSON has it. Pure."""
    return {"num": amount.num, "bytes": amount.num_bytes}


def _amount_lines(summary: PlaceSummary) -> list[str]:
    named = (
        (
            summary.temporary,
            "temporary file",
            "to be written over, being written, or of a crash: the next engine removes those",
        ),
        (summary.foreign, "foreign entry", "never touched"),
        (
            summary.other_format,
            "block of another version",
            "left to its engines; kvtier purge --older-formats removes those of older ones",
        ),
    )
    return [
        f"{_entries(amount.num, word)}, {size_in_words(amount.num_bytes)}: {meaning}"
        for amount, word, meaning in named
        if amount.num
    ]


def _age_lines(tallies: Mapping[str, NamespaceTally]) -> list[str]:
    """Return how many blocks were last used when; nothing for a place without times. Pure."""
    sums = [sum(counts) for counts in zip(*(one.by_age for one in tallies.values()), strict=True)]
    named = [f"{num:,} {words}" for num, words in zip(sums, AGE_WORDS, strict=False) if num]
    return [f"blocks by last use: {', '.join(named)}"] if named else []


def _tenant_lines(
    described: Mapping[str, PlaceNamespace], tallies: Mapping[str, NamespaceTally]
) -> list[str]:
    """Return what each tenant has, the most first; nothing where no namespace has one. Pure."""
    amounts: dict[str, Amount] = {}
    for name, tally in tallies.items():
        document = read_document(described.get(name, PlaceNamespace(name))) or {}
        tenant = str(document.get("tenant") or "")
        amounts[tenant] = amounts.get(tenant, Amount()).plus(tally.blocks, tally.num_bytes)
    if not any(amounts):
        return []
    lines = []
    for tenant, amount in sorted(amounts.items(), key=lambda each: -each[1].num_bytes):
        name = f"tenant {tenant}" if tenant else "no tenant"
        lines.append(f"{name}: {counted(amount.num, 'block')}, {size_in_words(amount.num_bytes)}")
    return lines


def _entries(num: int, word: str) -> str:
    return counted(num, word) if num == 1 else f"{num:,} {PLURALS.get(word, word + 's')}"


PLURALS = {"foreign entry": "foreign entries", "block of another version": "blocks of another version"}


def _namespace_lines(namespace: PlaceNamespace, tally: NamespaceTally, now_s: float) -> list[str]:
    head = f"namespace {namespace.name}: {counted(tally.blocks, 'block')}, {size_in_words(tally.num_bytes)}"
    if tally.newest_s is not None and tally.oldest_s is not None:
        ages = [in_words_from(now_s, used_s) for used_s in (tally.newest_s, tally.oldest_s)]
        head += f", last used {ages[0]}" + (f", the oldest {ages[1]}" if ages[0] != ages[1] else "")
    document = read_document(namespace)
    if document is None:
        return [head, "  its identity is not described here"]
    return [head, *(f"  {part}" for part in _wrapped(describe(document)))]


def _request_tenant_lines(tally: NamespaceTally, tenants: Mapping[int, str]) -> list[str]:
    """Return a line for each tenant of requests; none where there are none."""
    if not any(tally.tenants):
        return []
    return [
        f"  {f'tenant {in_hex(number)} ({tenants.get(number, NOT_NAMED)})' if number else 'of no tenant'}: "
        f"{counted(num, 'block')}, {size_in_words(num_bytes)}"
        for number, (num, num_bytes) in sorted(tally.tenants.items())
    ]


def _wrapped(parts: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 2 <= MAX_LINE_CHARS:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return lines


def _difference_lines(largest: PlaceNamespace, other: PlaceNamespace) -> list[str]:
    try:
        found = differences(other.document, largest.document)
    except NamespaceDocumentError:
        return []
    lines = [
        f"  differs from {largest.name[:8]} in {one.field}: {one.value_a or NONE}, there {one.value_b or NONE}"
        for one in found
    ]
    more = len(lines) - MAX_DIFFERENCES
    return lines[:MAX_DIFFERENCES] + ([f"  and in {counted(more, 'further field')}"] if more > 0 else [])
