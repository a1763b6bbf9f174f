"""``kvtier purge PLACE``: remove blocks for good, by namespace, tenant or age. Engines that use it see misses."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import typer

from kvtier.cli.output import size_in_words
from kvtier.cli.place.options import (
    PLACE_ARGUMENT,
    JsonOption,
    advance,
    choose_namespaces,
    counted,
    duration_in_words,
    opened,
    parse_duration,
    printable,
    progress_bar,
    read_document,
)
from kvtier.errors import ConfigError, TierError
from kvtier.tiering.kit.place import Amount, Place, PlaceBlock, PlaceNamespace
from kvtier.tiering.places import names_of_place_tiers

BATCH_BLOCKS = 500
"""Blocks removed at a stretch: a bulk request of a store, a round trip of a server, a change of a shared count."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What is to be removed.

    Attributes:
        namespaces: names of those that count; None: all.
        used_before_s: only what was last used before then, seconds since 1970; None: whatever its age.
        emptied: names of the namespaces of which nothing is to stay.
    """

    namespaces: tuple[str, ...] | None
    used_before_s: float | None
    emptied: tuple[str, ...]

    def covers(self, block: PlaceBlock) -> bool:
        """Return whether a block of these namespaces is old enough. Pure."""
        if self.used_before_s is None:
            return True
        return block.used_s is not None and block.used_s < self.used_before_s


def purge(
    place: Annotated[str | None, PLACE_ARGUMENT] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="Those of a namespace: the beginning of its name. May be repeated."),
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Those of a tenant: its tag, as kvtier inspect shows it.")
    ] = None,
    older_than: Annotated[str | None, typer.Option(help='Those not used for so long, such as "7d".')] = None,
    all_blocks: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    instance: Annotated[
        str | None, typer.Option(help="Instead of a place: a living engine, as kvtier ps shows it.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help='With --instance: the tier, "host" for host memory.')
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove blocks from a tier's place for good. Engines that use it see misses, and go on.

    Give at least one of --namespace, --tenant and --older-than, which narrow each other down, or --all. With --instance
    a living engine forgets what it holds: give --tier host, or --all.

    Raises:
        KVTierError: no selector, a selector that selects nothing, or the place cannot be changed.
    """
    if instance is not None or tier or place is None:
        has_others = bool(place or namespace or tenant or older_than or dry_run)
        purge_instance(instance, tier or [], is_all=all_blocks, has_others=has_others, as_json=as_json)
        return
    check_selectors(has_selector=bool(namespace or tenant or older_than), is_all=all_blocks)
    age_s = None if older_than is None else parse_duration("--older-than", older_than)
    with opened(place) as found:
        selection = select(found, namespace or [], tenant, age_s)
        began_s = time.monotonic()
        removed = measure(found, selection) if dry_run else remove(found, selection)
        took_s = time.monotonic() - began_s
    print_removed(removed, selection, took_s, dry_run=dry_run, as_json=as_json)


def select(place: Place, starts: Sequence[str], tenant: str | None, age_s: float | None) -> Selection:
    """Return what the options select in a place.

    Raises:
        ConfigError: an option chooses nothing.
        TierError: blocks have no time there, and an age is given.
    """
    if age_s is not None and not place.has_times:
        able = ", ".join(name for name in names_of_place_tiers() if name != place.tier)
        message = f"its blocks have no time: choose by --namespace, or give --all; those of {able} have one"
        raise TierError(place.tier, message)
    known = place.namespaces()
    names = choose(known, starts, tenant)
    if age_s is not None:
        return Selection(names, time.time() - age_s, ())
    return Selection(names, None, tuple(one.name for one in known if names is None or one.name in names))


def print_removed(
    removed: Amount, selection: Selection, took_s: float, *, dry_run: bool, as_json: bool
) -> None:
    """Print what was removed, or would be."""
    if as_json:
        names = None if selection.namespaces is None else list(selection.namespaces)
        report = {"blocks": removed.num, "bytes": removed.num_bytes, "dry_run": dry_run, "took_s": took_s}
        typer.echo(json.dumps(report | {"namespaces": names}, indent=1))
        return
    verb = "would remove" if dry_run else "removed"
    size = size_in_words(removed.num_bytes)
    typer.echo(f"{verb} {counted(removed.num, 'block')}, {size}, in {duration_in_words(took_s)}")


def purge_instance(
    instance: str | None, tiers: Sequence[str], *, is_all: bool, has_others: bool, as_json: bool
) -> None:
    """Make a living engine forget what it holds.

    Args:
        instance: the engine.
        tiers: the tiers to purge.
        is_all: purge each tier that can be.
        has_others: whether options are given that are about a place.
        as_json: print JSON.

    Raises:
        ConfigError: neither an engine nor a place is given, or both.
        ControlError: the engine cannot be reached.
    """
    if instance is None and not has_others and not tiers:
        raise ConfigError("PLACE", None, "give a tier's place, or a living engine: --instance ID --tier host")
    if instance is None:
        raise ConfigError("--instance", None, "give a PLACE, or with --tier a living engine")
    if has_others:
        remedy = "goes with --tier or --all and nothing else: a PLACE needs no engine"
        raise ConfigError("--instance", instance, remedy)
    # Imported here: what is about places works where no engine can be reached.
    from kvtier.cli.live.steer import DEFAULT_TIMEOUT_S, purge_living

    purge_living(instance, tiers, is_all=is_all, timeout_s=DEFAULT_TIMEOUT_S, as_json=as_json)


def check_selectors(*, has_selector: bool, is_all: bool) -> None:
    """Refuse a command that does not say what to remove, or says it twice. Pure.

    Raises:
        ConfigError: neither a selector nor ``--all``, or both.
    """
    if not has_selector and not is_all:
        remedy = "say what to remove: --namespace, --tenant or --older-than; to remove every block, --all"
        raise ConfigError("--all", value=False, remedy=remedy)
    if has_selector and is_all:
        raise ConfigError("--all", value=True, remedy="goes with no other selector: leave one out")


def choose(
    known: Sequence[PlaceNamespace], starts: Sequence[str], tenant: str | None
) -> tuple[str, ...] | None:
    """Return the namespaces that the options choose, None for all. Pure.

    Raises:
        ConfigError: an option chooses none.
    """
    names = tuple(choose_namespaces(starts, known)) if starts else None
    if tenant is None:
        return names
    of_tenant = {
        one.name: document.get("tenant") for one in known if (document := read_document(one)) is not None
    }
    chosen = tuple(name for name, tag in of_tenant.items() if tag and tag == tenant)
    if not chosen:
        tags = printable(", ".join(sorted({str(tag) for tag in of_tenant.values() if tag}))) or "none"
        remedy = f"must be the tag of a tenant that has something here: {tags}"
        raise ConfigError("--tenant", tenant, remedy, max_value_chars=80)
    return chosen if names is None else tuple(name for name in names if name in chosen)


def measure(place: Place, selection: Selection) -> Amount:
    """Return what ``remove`` would remove."""
    amount = Amount()
    for block in place.blocks(selection.namespaces):
        if selection.covers(block):
            amount = amount.plus(block.num_blocks, block.num_bytes)
    return amount


def remove(place: Place, selection: Selection) -> Amount:
    """Remove what is selected and return how much that was; what another purge removes meanwhile is not counted.

    Raises:
        TierError: the place cannot be changed; what was removed until then stays removed.
    """
    place.begin_removal()
    removed = Amount()
    try:
        # What a bar needs is counted only for one: a store may have to list a million names for it.
        with progress_bar("removing", lambda: measure(place, selection).num_bytes) as progress:
            chosen = (block for block in place.blocks(selection.namespaces) if selection.covers(block))
            for batch in batches(chosen):
                removed = removed.plus(
                    *place.remove(batch, unless_changed=selection.used_before_s is not None)
                )
                advance(progress, sum(block.num_bytes for block in batch))
    finally:
        place.end_removal(selection.emptied)
    return removed


def batches(blocks: Iterator[PlaceBlock]) -> Iterator[list[PlaceBlock]]:
    """Yield blocks some at a time."""
    while batch := list(islice(blocks, BATCH_BLOCKS)):
        yield batch
