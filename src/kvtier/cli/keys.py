"""``kvtier keys``: make a key ring, add keys to it, drop a tenant's, and prove that its blocks cannot be read.

A proof reads every block of a place and tries each key of the ring on those of the tenant: those whose keyed name says
so, and those whose header names a dropped entry of its own.
"""

import json
import os
import time
from collections.abc import Collection, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtier.base import OffloadKey
from kvtier.cli.place.options import ConfigOption, JsonOption, counted, printable
from kvtier.cli.place.request_tenants import read_engine_settings
from kvtier.config import KEY_FILE_VARIABLE
from kvtier.errors import ConfigError
from kvtier.quantities import size_in_words
from kvtier.settings import absolute_path
from kvtier.tenants import tenant_number
from kvtier.tiering.kit.envelope import Buffer, HeaderCheck, unpack
from kvtier.tiering.kit.key_ring import (
    KeyRing,
    add_entry,
    drop_tenant,
    locked,
    make_ring,
    read_ring,
    write_ring,
)
from kvtier.tiering.kit.place import Place
from kvtier.tiering.places import open_place

if TYPE_CHECKING:
    from kvtier.tiering.kit.encryption import BlockOpener


class Action(Enum):
    """What to do with the ring."""

    CREATE = "create"
    ROTATE = "rotate"
    DROP = "drop"
    LIST = "list"


def keys(
    action: Annotated[
        Action,
        typer.Argument(
            help="create: make the ring with one entry. rotate: add an entry, which encrypts from now on. "
            "drop: remove every entry of a tenant. list: show the entries, without secrets."
        ),
    ],
    key_file: Annotated[
        str | None,
        typer.Option("--key-file", help=f"The ring; without it {KEY_FILE_VARIABLE} names it."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose entry; without it the default one.")] = None,
    prove: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE",
            help="With drop: try to open every block of the tenant in this place; may be given several times.",
        ),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Manage the key ring of encrypted tiers. Exit status 1 when a proof opened a block.

    Engines notice a changed ring within a second of their next use of a tier.

    Raises:
        KVTierError: the ring or a place cannot be used, or the options do not fit together.
    """
    path = find_key_file(key_file)
    check_options(action, tenant, prove or (), config)
    salt = "" if config is None else read_engine_settings(config).tenant_salt
    if action is Action.LIST:
        ring = read_ring(path)
        _print_ring(ring, "\n".join(to_lines(ring)), as_json=as_json)
        return
    with locked(path):
        ring = change_ring(path, action, tenant, is_proof=bool(prove))
    if action is not Action.DROP:
        said = f"{path}: entry {ring.entries[-1].number} encrypts {_for_whom(tenant)} from now on"
        _print_ring(ring, said, as_json=as_json)
        return
    assert tenant is not None, "checked above"
    typer.echo(f"{path}: the keys of tenant {printable(tenant)!r} are gone", err=as_json)
    proofs = {where: prove_dropped(ring, tenant, where, salt) for where in prove or ()}
    if as_json:
        typer.echo(json.dumps({where: proof.to_json() for where, proof in proofs.items()}, indent=1))
    else:
        for where, proof in proofs.items():
            typer.echo(f"{where}: {proof.in_words()}")
    if any(proof.num_opened for proof in proofs.values()):
        raise typer.Exit(1)


def check_options(action: Action, tenant: str | None, prove: Sequence[str], config: Path | None) -> None:
    """Refuse options that do not go with the action. Pure.

    Raises:
        ConfigError: one does not.
    """
    if (action is Action.DROP) != (tenant is not None) and action in (Action.DROP, Action.LIST):
        raise ConfigError("--tenant", tenant, f"is needed by drop and not by list; this is {action.value}")
    if prove and action is not Action.DROP:
        raise ConfigError("--prove", list(prove), "goes with drop", max_value_chars=80)
    if config is not None and not prove:
        raise ConfigError("--config", str(config), "goes with --prove", max_value_chars=80)


def find_key_file(given: str | None) -> Path:
    """Return the absolute path of the ring.

    Raises:
        ConfigError: nothing names it.
    """
    found = given if given is not None else os.environ.get(KEY_FILE_VARIABLE)
    if not found:
        raise ConfigError("--key-file", found, f"give the path of the key ring, or set {KEY_FILE_VARIABLE}")
    path = Path(found).expanduser() if "\0" not in found else found
    return absolute_path("--key-file", os.path.abspath(path))  # noqa: PTH100 - resolves no link


def change_ring(path: Path, action: Action, tenant: str | None, *, is_proof: bool) -> KeyRing:
    """Change the ring's file and return what it has now.

    Args:
        path: the file.
        action: create, rotate or drop.
        tenant: whose entry; None for the default.
        is_proof: whether a tenant that was dropped before is no error.

    Raises:
        ConfigError: it cannot be read or written, or lacks the tenant.
    """
    if action is Action.CREATE:
        ring = add_entry(make_ring(), tenant, time.time())
        write_ring(path, ring, is_new=True)
        return ring
    ring = read_ring(path)
    if action is Action.ROTATE:
        ring = add_entry(ring, tenant, time.time())
    elif tenant in ring.dropped and ring.current(tenant) is None and is_proof:
        return ring
    else:
        assert tenant is not None, "the command has refused it"
        ring = drop_tenant(ring, tenant)
    write_ring(path, ring)
    return ring


class Proof:
    """Tries to open the blocks of one tenant; what a place checks encrypted blocks with meanwhile.

    Args:
        opener: the ring's keys.
        number: of the tenant.
        dropped: numbers of its entries that were dropped.

    Attributes:
        num_blocks: blocks of the tenant.
        num_bytes: their bytes.
        num_opened: how many of them a key of the ring opened.
        num_read: encrypted blocks that were read, of any tenant.
    """

    def __init__(self, opener: "BlockOpener", number: int, dropped: Collection[int]) -> None:
        self._opener = opener
        self._number = number
        self._dropped = frozenset(dropped)
        self.num_blocks = 0
        self.num_bytes = 0
        self.num_opened = 0
        self.num_read = 0

    def key_of(self, namespace: bytes, name: bytes) -> OffloadKey:
        """Return the block that an encrypted namespace calls so."""
        return self._opener.key_of(namespace, name)

    def is_of_ring(self, namespace: bytes, name: bytes) -> bool:
        """Return whether the ring made a name."""
        return self._opener.is_of_ring(namespace, name)

    def open(self, header: Buffer, payload: Buffer) -> HeaderCheck:
        """Count a block, and try every key if it is the tenant's."""
        envelope = unpack(header)
        if isinstance(envelope, HeaderCheck):
            return envelope
        self.num_read += 1
        if envelope.key_id in self._dropped or self._opener.tenant_number(envelope) == self._number:
            self.num_blocks += 1
            self.num_bytes += len(payload)
            self.num_opened += self._opener.opens_with_any(header, payload)
        return HeaderCheck.OK

    def read(self, place: Place) -> None:
        """Read every block of a place.

        Raises:
            TierError: it cannot be read.
        """
        place.unlock(self)
        for block in place.blocks():
            place.check(block)

    def in_words(self) -> str:
        """Return what was found."""
        found = f"{counted(self.num_blocks, 'block')} of the tenant, {size_in_words(self.num_bytes)}"
        return f"{found}, among {self.num_read:,} encrypted: {self.num_opened} opened"

    def to_json(self) -> dict[str, int]:
        """Return the same for programs."""
        return {
            "encrypted_blocks": self.num_read,
            "blocks_of_tenant": self.num_blocks,
            "bytes_of_tenant": self.num_bytes,
            "opened": self.num_opened,
        }


def prove_dropped(ring: KeyRing, tenant: str, where: str, salt: str = "") -> Proof:
    """Try to open each block of a tenant in a place with every key that is left.

    Args:
        ring: the ring.
        tenant: the name.
        where: the place.
        salt: ``tenant_salt`` of the engines whose tenant it is. Without it only those of its blocks are found that its
            own keys have encrypted.

    Raises:
        KVTierError: the place cannot be read.
    """
    from kvtier.tiering.kit.encryption import BlockOpener

    proof = Proof(BlockOpener(ring), tenant_number(tenant, salt), ring.dropped.get(tenant, ()))
    place = open_place(where)
    try:
        proof.read(place)
    finally:
        place.close()
    return proof


def to_lines(ring: KeyRing) -> list[str]:
    """Return the entries for people. Pure."""
    lines = []
    for entry in ring.entries:
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(entry.created_s))
        is_current = ring.current(entry.tenant) == entry
        use = "encrypts and reads" if is_current else "reads"
        lines.append(f"{entry.number:6} {made}  {use:18}  {_for_whom(entry.tenant)}")
    for tenant, numbers in ring.dropped.items():
        shown = ", ".join(map(str, numbers))
        lines.append(f"dropped: tenant {printable(tenant)!r}, entries {shown}")
    return lines or ["no entry"]


def to_json(ring: KeyRing) -> dict[str, Any]:  # Any: JSON
    """Return the entries for programs, without secrets. Pure."""
    return {
        "entries": [
            {
                "number": entry.number,
                "created_s": entry.created_s,
                "tenant": entry.tenant,
                "is_current": ring.current(entry.tenant) == entry,
            }
            for entry in ring.entries
        ],
        "dropped": {tenant: list(numbers) for tenant, numbers in ring.dropped.items()},
    }


def _print_ring(ring: KeyRing, text: str, *, as_json: bool) -> None:
    typer.echo(json.dumps(to_json(ring), indent=1) if as_json else text)


def _for_whom(tenant: str | None) -> str:
    return "blocks of tenants without an entry" if tenant is None else f"tenant {printable(tenant)!r}"
