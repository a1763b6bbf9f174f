"""``kvtier purge PLACE``: remove blocks for good, by namespace, tenant or age. Engines that use it see misses."""

import json
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated

import typer

from kvtier.cli.live.steer import purge_living
from kvtier.cli.place.options import (
    ConfigOption,
    JsonOption,
    KeyFileOption,
    OptionalPlaceArgument,
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
from kvtier.cli.place.request_tenants import (
    RequestTenants,
    describe_left_out,
    find_tenant,
    read_engine_settings,
)
from kvtier.errors import ConfigError, TierError
from kvtier.namespace import is_older_layout
from kvtier.quantities import size_in_words
from kvtier.tiering.kit.place import Amount, Place, PlaceBlock, PlaceNamespace
from kvtier.tiering.places import names_of_place_tiers

BATCH_BLOCKS = 500
"""Blocks removed at a stretch: a bulk request of a store, a round trip of a server, a change of a shared count."""


TenantOption = Annotated[
    str | None,
    typer.Option(
        help="Those of a tenant: its name in requests, or an engine's tag as kvtier inspect shows it."
    ),
]

OlderFormatsOption = Annotated[
    bool,
    typer.Option(
        "--older-formats",
        help="Instead of blocks: files of an older kvtier that no tier reads any more, a file a block and slabs.",
    ),
]


ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Where an engine does not answer in 10 s, remove its packs with all that they hold (fs).",
    ),
]


@dataclass(frozen=True, slots=True)
class Selection:
    """What is to be removed.

    Attributes:
        namespaces: names of those that count; None: all.
        used_before_s: only what was last used before then, seconds since 1970; None: whatever its age.
        emptied: names of the namespaces of which nothing is to stay.
        tenant: only blocks of requests of the tenant with this number; None: whosever they are.
    """

    namespaces: tuple[str, ...] | None
    used_before_s: float | None
    emptied: tuple[str, ...]
    tenant: int | None = None

    def covers(self, block: PlaceBlock) -> bool:
        """Return whether a block of these namespaces is the tenant's and old enough. Pure."""
        if self.tenant is not None and block.tenant != self.tenant:
            return False
        if self.used_before_s is None:
            return True
        return block.used_s is not None and block.used_s < self.used_before_s


def purge(
    place: OptionalPlaceArgument = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="Those of a namespace: the beginning of its name. May be repeated."),
    ] = None,
    tenant: TenantOption = None,
    older_than: Annotated[str | None, typer.Option(help='Those not used for so long, such as "7d".')] = None,
    older_layouts: Annotated[
        bool, typer.Option("--older-layouts", help="Those of an older kvtier, which this one cannot read.")
    ] = False,
    older_formats: OlderFormatsOption = False,
    all_blocks: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    force: ForceOption = False,
    instance: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Instead of a place: a running engine removes what is its own."),
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help='With --instance, "host" or a tier\'s type. May be repeated.')
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.01, max=3600.0, help="With --instance: seconds it has.")
    ] = 30.0,
    key_file: KeyFileOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove blocks from a tier's place for good. Engines that use it see misses, and go on.

    Give at least one of --namespace, --tenant, --older-than and --older-layouts, which narrow each other down, or
    --all, or --older-formats. With --instance a running engine removes its own blocks from host memory and its tiers;
    give --tier, --all or --tenant.

    Raises:
        KVTierError: no selector, a selector that selects nothing, or the place cannot be changed.
    """
    needs_place = bool(
        namespace or older_than or older_layouts or older_formats or dry_run or force or config
    )
    check_target(place, instance, tier or (), needs_place=needs_place)
    if place is None:
        purge_living(
            instance, tier or (), tenant=tenant, is_all=all_blocks, timeout_s=timeout_s, as_json=as_json
        )
        return
    has_selector = bool(namespace or tenant or older_than or older_layouts)
    check_selectors(has_selector=has_selector, is_all=all_blocks, is_of_older_formats=older_formats)
    if older_formats:
        purge_older_formats(place, dry_run=dry_run, as_json=as_json)
        return
    purge_place(
        place,
        namespace or [],
        tenant,
        older_than,
        older_layouts=older_layouts,
        key_file=key_file,
        salt="" if config is None else read_engine_settings(config).tenant_salt,
        dry_run=dry_run,
        is_forced=force,
        as_json=as_json,
    )


def check_target(place: str | None, instance: str | None, tiers: Sequence[str], *, needs_place: bool) -> None:
    """Refuse a command that names neither a place nor an engine, or both. Pure.

    Raises:
        ConfigError: it does, or an option goes with the other of the two.
    """
    if (place is None) == (instance is None):
        raise ConfigError("PLACE", place, "give either a place or --instance ID")
    if instance is not None and needs_place:
        raise ConfigError(
            "--instance", instance, "goes with --tier, --tenant and --all; other selectors need a PLACE"
        )
    if place is not None and tiers:
        raise ConfigError("--tier", list(tiers), "goes with --instance")


def purge_place(
    place: str,
    namespace: Sequence[str],
    tenant: str | None,
    older_than: str | None,
    *,
    older_layouts: bool = False,
    key_file: str | None = None,
    salt: str = "",
    dry_run: bool,
    is_forced: bool = False,
    as_json: bool,
) -> None:
    """Remove blocks from a place; the arguments are the options of the command.

    A tenant is one of the engines with the ``tenant_salt`` that is given.

    Raises:
        KVTierError: a selector selects nothing, or the place cannot be changed.
    """
    age_s = None if older_than is None else parse_duration("--older-than", older_than)
    with opened(place, key_file) as found:
        if age_s is not None:
            require_times(found)
        known = found.namespaces()
        number = None if tenant is None else find_tenant(found, known, tenant, salt)
        names = choose(known, namespace, tenant if number is None else None)
        names = keep_older_layouts(known, names) if older_layouts else names
        selection = make_selection(known, names, None if age_s is None else time.time() - age_s, number)
        began_s = time.monotonic()
        removed = measure(found, selection) if dry_run else remove(found, selection, is_forced=is_forced)
        took_s = time.monotonic() - began_s
    if number is not None:
        say_left_out(known, names, salt)
    if as_json:
        report = {"blocks": removed.num, "bytes": removed.num_bytes, "dry_run": dry_run, "took_s": took_s}
        typer.echo(json.dumps(report | {"namespaces": None if names is None else list(names)}, indent=1))
        return
    verb = "would remove" if dry_run else "removed"
    size = size_in_words(removed.num_bytes)
    typer.echo(f"{verb} {counted(removed.num, 'block')}, {size}, in {duration_in_words(took_s)}")


def purge_older_formats(place: str, *, dry_run: bool, as_json: bool) -> None:
    """Remove from a place what older versions wrote into files that no tier reads any more.

    Raises:
        KVTierError: the place cannot be changed.
    """
    with opened(place, None) as found:
        removed = found.remove_older_formats(is_dry_run=dry_run)
    if as_json:
        report = {"files": removed.num, "bytes": removed.num_bytes, "dry_run": dry_run}
        typer.echo(json.dumps(report, indent=1))
        return
    verb = "would remove" if dry_run else "removed"
    typer.echo(f"{verb} {counted(removed.num, 'file')} of older versions, {size_in_words(removed.num_bytes)}")


def require_times(place: Place) -> None:
    """Refuse to choose by age where blocks have none. Pure.

    Raises:
        TierError: they have none.
    """
    if not place.has_times:
        able = ", ".join(name for name in names_of_place_tiers() if name != place.tier)
        message = f"its blocks have no time: choose by --namespace, or give --all; those of {able} have one"
        raise TierError(place.tier, message)


def say_left_out(known: Sequence[PlaceNamespace], names: Collection[str] | None, salt: str) -> None:
    """Say on stderr in which namespaces a tenant was not looked for."""
    for line in describe_left_out(known, names, salt):
        typer.echo(f"left as they are: {line}", err=True)


def check_selectors(*, has_selector: bool, is_all: bool, is_of_older_formats: bool = False) -> None:
    """Refuse a command that does not say what to remove, or says it twice. Pure.

    Raises:
        ConfigError: no selector, or one beside ``--all`` or ``--older-formats``.
    """
    if is_of_older_formats and (has_selector or is_all):
        raise ConfigError("--older-formats", value=True, remedy="goes with no other selector: leave one out")
    if not has_selector and not is_all and not is_of_older_formats:
        remedy = (
            "say what to remove: --namespace, --tenant, --older-than, --older-layouts or --older-formats; "
            "to remove every block, --all"
        )
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
        remedy = (
            "must be a tenant of requests, of an engine with a tenant_salt with --config FILE, its settings, or the "
            f"tag of an engine's tenant, that has something here: {tags}"
        )
        raise ConfigError("--tenant", tenant, remedy, max_value_chars=80)
    return chosen if names is None else tuple(name for name in names if name in chosen)


def keep_older_layouts(known: Sequence[PlaceNamespace], names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return those of some namespaces, None for all, that an older kvtier wrote and this one cannot read. Pure."""
    documents = {one.name: read_document(one) for one in known if names is None or one.name in names}
    return tuple(
        name for name, document in documents.items() if document is not None and is_older_layout(document)
    )


def make_selection(
    known: Sequence[PlaceNamespace],
    names: tuple[str, ...] | None,
    used_before_s: float | None,
    tenant: int | None,
) -> Selection:
    """Return what is to be removed: of the chosen namespaces all, or what an age and a tenant leave of them. Pure."""
    emptied: tuple[str, ...] = ()
    if used_before_s is None and tenant is None:
        emptied = tuple(one.name for one in known if names is None or one.name in names)
    return Selection(names, used_before_s, emptied, tenant)


def measure(place: Place, selection: Selection) -> Amount:
    """Return what ``remove`` would remove."""
    amount = Amount()
    for block in choose_blocks(place, selection):
        amount = amount.plus(block.num_blocks, block.num_bytes)
    return amount


def choose_blocks(place: Place, selection: Selection) -> Iterator[PlaceBlock]:
    """Yield the blocks of a place that are selected."""
    blocks = place.blocks(selection.namespaces)
    if selection.tenant is not None:
        blocks = RequestTenants(place.namespaces(), place.opener).told(blocks)
    return filter(selection.covers, blocks)


def remove(place: Place, selection: Selection, *, is_forced: bool = False) -> Amount:
    """Remove what is selected and return how much that was; what another purge removes meanwhile is not counted.

    Args:
        place: where.
        selection: what.
        is_forced: whether packs of an engine that does not answer go as a whole.

    Raises:
        TierError: the place cannot be changed; what was removed until then stays removed.
    """
    place.begin_removal(is_forced=is_forced)
    removed = Amount()
    try:
        # What a bar needs is counted only for one: a store may have to list a million names for it.
        with progress_bar("removing", lambda: measure(place, selection).num_bytes) as progress:
            for batch in batches(choose_blocks(place, selection)):
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
